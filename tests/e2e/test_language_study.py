"""A study of a language model through its real commands: killed, resumed, and its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def wait_until(found, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "too slow"
        time.sleep(0.2)


def trainings(out: Path) -> list[int]:
    """The ids of processes that train in a study's folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train.py" in words and any(str(out).encode() in word for word in words):
            found.append(int(folder.name))
    return found


@pytest.mark.long
def test_study_that_is_killed_resumes_and_reports(long_corpus, tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "eval.study", "variants", "--scale", "smoke", "--out", str(out)]
    words += ["--data", str(long_corpus), "--models", "cat", "--seeds", "1", "--tokens", "65536"]
    words += ["--documents", "4", "--workers", "1"]
    first = subprocess.Popen(words, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"})
    metrics = lambda: list(out.glob("runs/*/metrics.jsonl"))  # noqa: E731
    wait_until(lambda: metrics() and metrics()[0].stat().st_size > 0, 300)
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not trainings(out))  # it has no parent any more, saves and ends
    done = json.loads(metrics()[0].read_text().splitlines()[-1])["step"]
    again = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    assert "1 runs, 1 to do" in again.stdout
    (cell,) = (out / "cells").iterdir()
    record = json.loads(cell.read_text())
    assert {row["method"] for row in record["rows"]} == {"none", "pi+temperature"}
    assert {row["length"] for row in record["rows"]} == {64, 128, 256, 512, 1024}
    assert all(0 < row["loss"] < 6 for row in record["rows"])
    steps = [json.loads(line)["step"] for line in metrics()[0].read_text().splitlines()]
    assert 0 < done < 64 == max(steps) and steps == sorted(steps)
    assert steps.count(1) == 1, "it was resumed, not begun anew"
    assert (out / "variants.md").is_file() and (out / "variants.png").is_file()
