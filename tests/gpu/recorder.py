"""A pytest plugin that keeps the results in a JSON file as they come: `-p tests.gpu.recorder`.

The file is whole after every test, so that a session that is killed leaves what it had found.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cat_lm.io.files import write_json
from eval.common.provenance import provenance


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="where to keep the results")


def pytest_configure(config: pytest.Config) -> None:
    # Workers report to the process that started them.
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--record")))


class Recorder:
    """Writes `{"tests": [{"name", "outcome", "seconds", "message"}], "ended": exit code, …}`."""

    def __init__(self, path: Path) -> None:
        self.path, self.written = path, 0.0
        self.record: dict[str, Any] = {**provenance(), "ended": None, "tests": []}
        write_json(path, self.record)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that passes has one entry; what fails or skips before and after it, too."""
        if report.when != "call" and report.outcome == "passed":
            return
        entry = {"name": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "skipped":
            entry["message"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        elif report.outcome == "failed":
            entry["message"] = _message(report)
        self.record["tests"].append(entry)
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure, one skipped as a whole a skip."""
        if report.outcome == "passed":
            return
        entry = {"name": report.nodeid, "outcome": report.outcome, "seconds": 0.0}
        self.record["tests"].append(entry | {"message": _message(report)})
        self._write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.record["ended"] = int(exitstatus)
        write_json(self.path, self.record)

    def _write(self) -> None:
        """Not more than once a second: each is flushed to the disk."""
        if (now := time.monotonic()) > self.written + 1:
            write_json(self.path, self.record)
            self.written = now


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that says what was wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    lines = text.strip().splitlines() or ["no message"]
    return lines[0] if crash else lines[-1]
