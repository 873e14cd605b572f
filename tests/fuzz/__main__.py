"""`python -m tests.fuzz --minutes N`: the properties of all tests, on other examples each time.

Exit codes: 0 all held, 1 some did not, 2 bad input.
"""

from __future__ import annotations

import argparse
import time

import pytest

from cat_lm.core.cli import Parser
from cat_lm.core.errors import UserError, command
from tests.conftest import REPOSITORY


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tests.fuzz",
        description="Runs every test that is a property (of a command on damaged files and with "
        "odd options, a reader, an order, a packing) again and again. What breaks one is reported "
        "once, and is tried first the next time.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, metavar="N", help="how long (default: 1)")
    text = "tests whose name contains this, such as export or test_shards; repeatable"
    add("--only", action="append", default=[], metavar="TARGET", help=text)
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0:
        raise UserError(f"--minutes {arguments.minutes}: must be greater than 0")
    return arguments


class Rounds:
    """Runs the test that has had the least time, until all time is over.

    A test that has failed or was skipped is not run again.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.over: set[str] = set()
        self.runs = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.properties = len(session.items)
        spent = dict.fromkeys(session.items, 0.0)
        while spent and time.monotonic() < self.end:
            item, start = min(spent, key=spent.get), time.monotonic()
            # The session as the next keeps its fixtures, and ends those of the test.
            item.ihook.pytest_runtest_protocol(item=item, nextitem=session)
            spent[item] += time.monotonic() - start
            self.runs += 1
            if item.nodeid in self.over:
                del spent[item]
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.over.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        write(f"{self.runs} runs of {self.properties} properties")
        for report in terminalreporter.getreports("failed"):
            name = report.nodeid.partition("::")[2]
            write(f"again: python -m tests.fuzz --only '{name}' (the failure is tried first)")


@command
def main() -> None:
    arguments = parse_arguments()
    files = [
        str(path)
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if "from hypothesis import" in path.read_text(encoding="utf-8")
    ]
    options = ["-q", "--nightly", "-m", "hypothesis", "--hypothesis-profile=other", "--tb=short"]
    options += ["--disable-warnings", "--override-ini=addopts="]
    if arguments.only:
        options += ["-k", " or ".join(arguments.only)]
    rounds = Rounds(60 * arguments.minutes)
    code = pytest.main([*options, f"--rootdir={REPOSITORY}", *files], plugins=[rounds])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise UserError(f"--only {' '.join(arguments.only)}: is in the name of no property")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
