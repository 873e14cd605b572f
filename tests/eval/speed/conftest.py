"""The command of eval.speed on a CPU, called in this process. No test looks at durations."""

from __future__ import annotations

import json

import pytest

from eval.speed import timing
from eval.speed.__main__ import main
from tests.calls import call_main

TINY = ("--layers", 1, "--hidden-size", 32, "--heads", 2, "--vocab-size", 61, "--window", 3)


@pytest.fixture
def speed(monkeypatch, capsys, tmp_path):
    """Runs it: its exit code, record (None where none was written), stdout and stderr."""
    monkeypatch.setitem(timing._LARGE_COPY_BYTES, "cpu", 2**20)

    def run(benchmark: str, *arguments: object, device: str = "cpu"):
        path = tmp_path / "record.json"
        path.unlink(missing_ok=True)
        words = (benchmark, "--device", device, "--json", path)
        words += TINY * (benchmark in ("train", "decode")) + arguments
        code, *said = call_main(main, monkeypatch, capsys, "eval.speed", *words)
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return code, record, *said

    return run


@pytest.fixture
def conv(speed):
    """Runs `conv` on a small case, with changes of its options."""

    def run(**changes: object):
        options = {"shape": "2,40,3,8", "windows": "3", "dtype": "float32", "repeats": "2"}
        words = [f"--{k.replace('_', '-')}={v}" for k, v in (options | changes).items()]
        return speed("conv", *words)

    return run
