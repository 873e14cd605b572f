"""The command of eval.speed, called in this process.

No test looks at how long anything took.
"""

from __future__ import annotations

import json
import sys

import pytest

from eval.speed import machine
from eval.speed.__main__ import main


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs it: its exit code, record (None where none was written), stdout and stderr."""

    def run(*arguments: object) -> tuple[int, dict | None, str, str]:
        path = tmp_path / "record.json"
        path.unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["eval.speed", *map(str, (*arguments, "--json", path))])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return code, record, *capsys.readouterr()

    return run


@pytest.fixture
def speed(command, monkeypatch):
    """The same on a CPU."""
    monkeypatch.setitem(machine._LARGE_COPY_BYTES, "cpu", 2**20)
    return lambda *arguments: command(*arguments, "--device", "cpu")
