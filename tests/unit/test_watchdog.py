"""The watchdog ends what hangs, with the reason, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cat_lm.core.errors import REQUEUE_EXIT_CODE
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


WITHOUT_LAUNCHER = """
import os, sys, time
from cat_lm.training import watchdog
from cat_lm.training.watchdog import StopSignal
watchdog.ORPHAN_SECONDS = 0.5
gone = False
class Launcher:
    line = (4711,)
    def is_gone(self):
        return gone
stop = StopSignal()
guard = watchdog.Watchdog(10, Launcher())
"""


def orphan(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_LAUNCHER + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_rank_that_loses_its_launcher_before_the_first_step_ends_at_once():
    result = orphan("gone = True\ntime.sleep(60)")
    assert result.returncode == REQUEUE_EXIT_CODE
    (line,) = result.stderr.splitlines()
    assert "the launcher (process 4711) is gone, before the first step" in line


def test_a_rank_that_loses_its_launcher_is_told_to_stop():
    result = orphan(
        "watchdog.ORPHAN_SECONDS = 60\nguard.steps_begin(stop)\ngone = True\n"
        "while not stop._exit_code:\n    time.sleep(0.01)\n"
        "guard.close()\nsys.exit(stop._exit_code)"
    )
    assert result.returncode == REQUEUE_EXIT_CODE
    (line,) = result.stderr.splitlines()
    assert "the launcher (process 4711) is gone: a checkpoint follows after this step" in line


def test_where_no_step_ends_any_more_it_ends_by_force():
    result = orphan(
        "guard.steps_begin(stop)\nguard.progress('step 19')\ngone = True\ntime.sleep(60)"
    )
    assert result.returncode == REQUEUE_EXIT_CODE
    assert "after step 19: the run ends here with code 75" in result.stderr.splitlines()[-1]


def test_a_save_takes_the_time_that_it_takes():
    result = orphan(
        "guard.steps_begin(stop)\n"
        "with guard.unhurried():\n    gone = True\n    time.sleep(4)\n    os._exit(3)"
    )
    assert result.returncode == 3 and "a checkpoint follows" in result.stderr
