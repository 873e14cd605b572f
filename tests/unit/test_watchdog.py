"""The watchdog ends what hangs, with the reason, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cat_lm.training.watchdog import HUNG_EXIT_CODE

ROOT = Path(__file__).resolve().parents[2]
START = """
import ctypes, time
from cat_lm.training.watchdog import Watchdog
watchdog = Watchdog(minutes=0.01)
watchdog.progress("step 17")
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", START + code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_rank_that_hangs_ends_with_its_stacks():
    result = run("def waits_for_ever():\n    time.sleep(60)\nwaits_for_ever()")
    assert result.returncode == HUNG_EXIT_CODE
    assert "no progress for 0.0 minutes after step 17" in result.stderr
    assert "waits_for_ever" in result.stderr


def test_a_rank_that_holds_the_interpreter_ends_too():
    result = run("ctypes.PyDLL(None).sleep(60)")  # PyDLL keeps the lock during the call
    assert result.returncode == 1
    assert "Timeout" in result.stderr and "File" in result.stderr


def test_progress_keeps_it_alive_and_close_ends_it():
    result = run(
        "for _ in range(20):\n    time.sleep(0.1)\n    watchdog.progress('a step')\n"
        "watchdog.close()\ntime.sleep(1.5)"
    )
    assert (result.returncode, result.stderr) == (0, "")
