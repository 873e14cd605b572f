"""`python -m tests.fuzz --minutes N`: damaged files and odd command lines, by the thousand.

Exit codes: 0 every case ended well, 1 some failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cat_lm.core.cli import Parser
from cat_lm.core.errors import UserError, command
from tests.fuzz import schedule
from tests.fuzz.cases import parts_of
from tests.fuzz.pool import Templates, has_harness, make_world, scratch_folder
from tests.fuzz.report import Report
from tests.fuzz.targets import BY_NAME

WRITE_SECONDS = 20.0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tests.fuzz",
        description="Runs the project's commands on damaged files and with odd values. Each must "
        "be accepted or refused in one line, with nothing lost; verdict.py has the rules.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, metavar="N", help="how long (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="decides all cases (default: 0)")
    add("--workers", type=int, default=2, metavar="N", help="cases at once (default: 2)")
    add("--only", action="append", default=[], metavar="TARGET", help=", ".join(BY_NAME))
    add("--case", action="append", default=[], metavar="ID", help="this one, and show its output")
    add("--cases", type=int, metavar="N", help="at most so many")
    add("--out", type=Path, metavar="DIR", help="report.json, and the evidence of failures")
    arguments = parser.parse_args(argv)
    for name in arguments.only:
        if name not in BY_NAME:
            raise UserError(f"--only {name}: must be one of {', '.join(BY_NAME)}")
    for identifier in arguments.case:
        try:
            parts_of(identifier)
        except KeyError:
            raise UserError(f"--case {identifier}: must be as in export-file-12") from None
    if arguments.workers < 1 or not arguments.minutes > 0:
        raise UserError("--workers and --minutes: must be greater than 0")
    return arguments


@command
def main() -> None:
    arguments = parse_arguments()
    report = Report(arguments.out, arguments.seed)
    with scratch_folder() as scratch:
        first = Templates(scratch, 0)
        make_world(first, has_harness())
        if arguments.case:
            _show(arguments, first, report)
        else:
            workers = [Templates(scratch, i) for i in range(1, arguments.workers)]
            fuzz([first, *workers], _names(arguments), report, 60 * arguments.minutes)
    report.write()
    print(report.text())
    raise SystemExit(1 if report.causes else 0)


def fuzz(workers: list[Templates], names: Iterator[str], report: Report, seconds: float) -> None:
    """Runs cases until the time is over, in several threads that wait for their processes."""
    lock, started = threading.Lock(), time.monotonic()
    end, told = started + seconds, started

    def work(templates: Templates) -> None:
        nonlocal told
        try:
            while time.monotonic() < end:
                with lock:
                    name = next(names, None)
                if name is None:
                    return
                record = templates.case(name, report.seed)
                with lock:
                    report.add(record, templates.place)
                    if time.monotonic() - told > WRITE_SECONDS:
                        told = time.monotonic()
                        report.write()
                        print(progress(report, told - started), file=sys.stderr, flush=True)
        finally:
            templates.close()

    threads = [threading.Thread(target=work, args=(templates,)) for templates in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def progress(report: Report, seconds: float) -> str:
    return (
        f"{seconds:.0f} s: {report.cases} cases, {report.failed} failed, "
        f"{len(report.causes)} causes"
    )


def _names(arguments: argparse.Namespace) -> Iterator[str]:
    targets = schedule.chosen(arguments.only, has_harness())
    yield from schedule.plain_cases(targets)
    for number, name in enumerate(schedule.cases(targets, arguments.seed)):
        if arguments.cases is not None and number >= arguments.cases:
            return
        yield name


def _show(arguments: argparse.Namespace, templates: Templates, report: Report) -> None:
    """Runs the named cases, shows what they wrote, and keeps their folders under --out."""
    for identifier in arguments.case:
        record = templates.case(identifier, arguments.seed)
        report.add(record, templates.place)
        print(f"{record['id']}: {record['odd']}\n$ {record['command']}")
        print(f"{record['stdout']}{record['stderr']}exit code {record['code']}, ", end="")
        print(f"{record['seconds']} s, {record['megabytes']} MiB")
        if arguments.out is not None:
            kept = arguments.out / identifier
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(templates.place, kept, symlinks=True)
    templates.close()


if __name__ == "__main__":
    main()
