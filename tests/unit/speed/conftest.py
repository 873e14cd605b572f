"""The command of eval.speed, called in this process.

No test looks at how long anything took.
"""

from __future__ import annotations

import json

import pytest

from eval.speed import timing
from eval.speed.__main__ import main
from tests.unit.calls import call_main


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs it: its exit code, record (None where none was written), stdout and stderr."""

    def run(*arguments: object) -> tuple[int, dict | None, str, str]:
        path = tmp_path / "record.json"
        path.unlink(missing_ok=True)
        code, *said = call_main(main, monkeypatch, capsys, "eval.speed", *arguments, "--json", path)
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return code, record, *said

    return run


@pytest.fixture
def speed(command, monkeypatch):
    """The same on a CPU."""
    monkeypatch.setitem(timing._LARGE_COPY_BYTES, "cpu", 2**20)
    return lambda *arguments: command(*arguments, "--device", "cpu")
