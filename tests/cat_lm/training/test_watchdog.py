"""The watchdog ends what hangs, with the reason, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cat_lm.core.errors import REQUEUE_EXIT_CODE
from cat_lm.training.watchdog import HUNG_EXIT_CODE
from tests.conftest import REPOSITORY

START = """
import ctypes, os, sys, time
from cat_lm.training import watchdog
from cat_lm.training.watchdog import StopSignal, Watchdog
watchdog.ORPHAN_SECONDS = 0.5
gone = False
class Launcher:
    line = (4711,)
    def is_gone(self):
        return gone
stop = StopSignal()
"""
HANGING = START + "guard = Watchdog(0.01)\nguard.progress('step 17')\n"
ORPHAN = START + "guard = Watchdog(10, Launcher())\n"
STEPS = "guard.begin_steps(stop)\nguard.progress('step 19')\ngone = True\n"
GONE = "the launcher (process 4711) is gone"
# What a rank does, its exit code, and what it says.
CASES = {
    "hangs": (
        HANGING + "def waits_for_ever():\n    time.sleep(60)\nwaits_for_ever()",
        HUNG_EXIT_CODE,
        ("no progress for 0.0 minutes after step 17", "waits_for_ever"),
    ),
    # PyDLL keeps the interpreter's lock during the call.
    "holds the interpreter": (HANGING + "ctypes.PyDLL(None).sleep(60)", 1, ("Timeout", "File")),
    "gets on": (
        START + "guard = Watchdog(0.05)\nfor _ in range(18):\n    time.sleep(0.2)\n"
        "    guard.progress('a step')\nguard.close()\ntime.sleep(3.5)",
        0,
        (),
    ),
    "is an orphan before the first step": (
        ORPHAN + "gone = True\ntime.sleep(60)",
        REQUEUE_EXIT_CODE,
        (f"{GONE}, before the first step",),
    ),
    "is an orphan": (
        ORPHAN + "watchdog.ORPHAN_SECONDS = 60\n" + STEPS + "while not stop._exit_code:\n"
        "    time.sleep(0.01)\nguard.close()\nsys.exit(stop._exit_code)",
        REQUEUE_EXIT_CODE,
        (f"{GONE}: a checkpoint follows after this step",),
    ),
    "is an orphan whose step never ends": (
        ORPHAN + STEPS + "time.sleep(60)",
        REQUEUE_EXIT_CODE,
        ("after step 19: the run ends here with code 75",),
    ),
    "is an orphan that saves": (
        ORPHAN + "guard.begin_steps(stop)\nwith guard.allow_slow_work():\n    gone = True\n"
        "    time.sleep(4)\n    os._exit(3)",
        3,
        ("a checkpoint follows",),
    ),
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, subprocess.Popen]:
    """Start all at once: they mostly wait."""
    pipe = {"stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    return {
        case: subprocess.Popen([sys.executable, "-c", code], **pipe)
        for case, (code, _, _) in CASES.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_watchdog_ends_what_does_not_get_on(ranks, case):
    _, code, words = CASES[case]
    _, said = ranks[case].communicate(timeout=120)
    assert ranks[case].returncode == code, said
    assert all(word in said for word in words) and bool(said) == bool(words), said
