"""`python -m tests.mutations`: breaks the source by one fault at a time; does the suite find it?

A fault is applied to a clone of HEAD, where the tests that reach it (`--map`) are run until one
fails, for ten minutes at most: first the test that found the fault before, then the fastest.
`results.json` gets a line for each fault: `found` with the test, `survived`, `not covered` by any
test, or `error` where it does not apply. A test that fails without the fault as well proves
nothing, and is left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from cat_lm.core.cli import Parser
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_text
from tests.mutations.faults import Fault, read_faults
from tests.mutations.reached import function_of, in_order, make_map, read_map
from tests.mutations.scratch import Clone, Outcome

RESULTS = Path(__file__).with_name("results.json")
SECONDS = 600.0  # of a fault's tests


def examine(
    clone: Clone, fault: Fault, parts: Sequence[Sequence[str]], unsound: set[str]
) -> dict[str, Any]:
    """Run the tests of a fault with it, and give its result.

    Args:
        parts: the tests, in the order of their runs.
        unsound: tests that fail without any fault; those that are found are added.
    """
    if problem := fault.problem(clone.root):
        return {"result": "error", "why": problem}
    if not parts:
        return {"result": "not covered"}
    left = SECONDS
    try:
        for tests in parts:
            while left > 0:
                begin = time.monotonic()
                outcome = _with_fault(clone, fault, tests, left, unsound)
                left -= time.monotonic() - begin
                if outcome.is_cut:
                    return {"result": "survived", "why": f"no test failed in {SECONDS:.0f} s"}
                if outcome.test is None:
                    break
                if clone.test([outcome.test], SECONDS / 2).test is None:
                    return {"result": "found", "test": outcome.test, "how": outcome.how}
                unsound.add(outcome.test)
    except RuntimeError as error:
        return {"result": "error", "why": str(error)}
    return {"result": "survived"}


def _with_fault(
    clone: Clone, fault: Fault, tests: Sequence[str], seconds: float, unsound: Collection[str]
) -> Outcome:
    source = (clone.root / fault.file).read_text(encoding="utf-8")
    clone.write(fault.file, fault.broken(source))
    clone.commit_changes()
    try:
        return clone.test(tests, seconds, unsound)
    finally:
        clone.reset()


def read_results() -> dict[str, dict[str, Any]]:
    """Read the results that there are."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def add_result(name: str, result: dict[str, Any], order: Sequence[str]) -> None:
    """Write a result beside those that are there, which another process may have added to."""
    found = read_results() | {name: result}
    rows = [f"{json.dumps(n)}: {json.dumps(found[n])}" for n in order if n in found]
    write_text(RESULTS, "{\n" + ",\n".join(rows) + "\n}\n")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Write results as lines, and their counts."""
    lines = [
        f"{name:36} {row['result']:12} {row.get('test', row.get('why', ''))}"
        for name, row in results.items()
    ]
    counts = Counter(row["result"] for row in results.values())
    return "\n".join([*lines, ", ".join(f"{n} {word}" for word, n in counts.most_common())])


@command
def main() -> None:
    parser = Parser(
        prog="python -m tests.mutations",
        description="Breaks the source by one deliberate fault at a time, in a clone of HEAD, and "
        "tells whether the suite finds it. What is finished for this commit is not run again.",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults")
    parser.add_argument("--again", action="store_true", help="also what is finished")
    parser.add_argument("--list", action="store_true", help="print the faults, and end")
    parser.add_argument(
        "--map",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="run the suite, or what these arguments of pytest choose, and note which tests reach "
        "which fault",
    )
    arguments = parser.parse_args()
    faults = {fault.name: fault for fault in read_faults()}
    if arguments.list:
        print("\n".join(f"{f.name:36} {f.file}\n    {f.meaning}" for f in faults.values()))
        return
    for name in arguments.only:
        if name not in faults:
            raise UserError(f"--only {name}: no such fault; --list has them")
    chosen = arguments.only or list(faults)
    # A batch system's signal ends the tests as well, which have a session of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="cat-lm-mutations-") as folder:
        clone = Clone(Path(folder))
        if arguments.map is not None:
            make_map(clone, list(faults.values()), arguments.map)
            return
        _run([faults[name] for name in chosen], clone, list(faults), arguments.again)
    results = read_results()
    print(table({name: results[name] for name in chosen if name in results}))


def _run(faults: Sequence[Fault], clone: Clone, order: Sequence[str], again: bool) -> None:
    reached, unsound = read_map(), set()
    for fault in faults:
        known = read_results().get(fault.name, {})
        if known.get("commit") == clone.commit and not again:
            continue
        if not fault.tests and fault.name not in reached:
            raise UserError(f"{fault.name}: is not in the map; run --map first")
        begin = time.monotonic()
        parts = in_order(fault.tests or reached[fault.name], clone.root)
        if found_before := function_of(known.get("test", ""), clone.root):
            parts = [[found_before], *parts]
        result = examine(clone, fault, parts, unsound)
        result |= {"seconds": round(time.monotonic() - begin), "commit": clone.commit}
        add_result(fault.name, result, order)
        print(table({fault.name: result}).splitlines()[0], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
