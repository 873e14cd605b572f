"""Which tests reach which faults: made by probes in one run of the suite, kept in `map.json`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from tests import workers
from tests.mutations.faults import Fault, probed
from tests.mutations.probe import FOLDER, UNKNOWN
from tests.mutations.scratch import Clone

MAP = Path(__file__).with_name("map.json")


def make_map(clone: Clone, faults: Sequence[Fault], arguments: Sequence[str]) -> None:
    """Run the suite, or what pytest's arguments choose of it, with a probe at every fault.

    What a part of the suite reaches is added to the map that there is.
    """
    by_file: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        if not fault.tests and not fault.problem(clone.root):
            by_file[fault.file].append(fault)
    for file, own in by_file.items():
        source = (clone.root / file).read_text(encoding="utf-8")
        clone.write(file, probed(source, own))
    clone.commit_changes()
    hits = clone.folder / "hits"
    hits.mkdir()
    words = ["-n", "2", "--all", "-p", "no:cacheprovider", *arguments]
    environment = clone.environment | {FOLDER: str(hits)}
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=clone.root, env=environment)
    clone.reset()
    notes = (hits / "hits").read_text(encoding="utf-8") if any(hits.iterdir()) else ""
    found: dict[str, set[str]] = {fault.name: set() for fault in faults if not fault.tests}
    if arguments:
        for name, tests in read_map().items():
            found.setdefault(name, set()).update(tests)
    for name, test in (line.split("\t", 1) for line in notes.splitlines()):
        if name in found:  # else a test of the probe itself noted it
            found[name].update(_targets(test))
    _write({fault.name: found[fault.name] for fault in faults if fault.name in found})


def _targets(test: str) -> list[str]:
    """Give a test as pytest has it in its variable, without parameters.

    Where a fixture reached the line, the file too, whose other tests may share what it made.
    """
    if test == UNKNOWN:
        return []
    identifier, _, phase = test.rpartition(" (")
    file, _, function = identifier.partition("::")
    found = [f"{file}::{function.partition('[')[0]}"]
    return [*found, file] if phase == "setup)" else found


def _write(found: dict[str, set[str]]) -> None:
    tests = sorted(set().union(*found.values()))
    numbers = {test: number for number, test in enumerate(tests)}
    rows = {name: sorted(numbers[test] for test in own) for name, own in found.items()}
    # A line for each fault and test, so that differences can be read.
    named = ",\n".join(f"{json.dumps(test)}" for test in tests)
    reached = ",\n".join(f"{json.dumps(name)}: {json.dumps(own)}" for name, own in rows.items())
    MAP.write_text(f'{{"tests": [\n{named}\n],\n"faults": {{\n{reached}\n}}}}\n', encoding="utf-8")


def read_map() -> dict[str, list[str]]:
    """Read the tests that reach each fault; nothing where there is no map."""
    if not MAP.is_file():
        return {}
    stored = json.loads(MAP.read_text(encoding="utf-8"))
    return {name: [stored["tests"][n] for n in own] for name, own in stored["faults"].items()}


def in_order(tests: Collection[str], root: Path) -> list[list[str]]:
    """Order tests that are there, the fastest first; then the further ones of whole files."""
    seconds: dict[str, float] = defaultdict(float)
    for identifier, taken in workers.known_durations().items():
        file, _, function = identifier.partition("::")
        seconds[f"{file}::{function.partition('[')[0]}"] += taken
        seconds[file] += taken

    def cost(test: str) -> tuple:
        file = test.partition("::")[0]
        return seconds[test], seconds[file], file, test

    sources = {file: _source(root / file) for file in {test.partition("::")[0] for test in tests}}
    chosen, further = set(), set()
    for test in tests:
        file, name = test.partition("::")[0], test.rpartition("::")[2]
        if test == file:
            further |= {f"{file}::{other}" for other in _in(sources[file])}
        elif f"def {name}(" in sources[file]:
            chosen.add(test)
    return [sorted(part, key=cost) for part in (chosen, further - chosen) if part]


def function_of(test: str, root: Path) -> str | None:
    """Return a test without its parameters, or None where it no longer exists."""
    file, _, name = test.partition("[")[0].partition("::")
    exists = name and f"def {name.rpartition('::')[2]}(" in _source(root / file)
    return f"{file}::{name}" if exists else None


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _in(source: str) -> list[str]:
    """List the tests of a file as pytest names them, without parameters."""
    found = []
    for node in ast.parse(source).body:
        own = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names = (part.name for part in own if isinstance(part, ast.FunctionDef))
        found += [prefix + name for name in names if name.startswith("test_")]
    return found
