"""Commands of the fuzz test run without root, so that `/dev`, `/proc` and other files stay safe."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NOBODY = 65534
_SUBREAPER, _DEATH_SIGNAL = 36, 1
# Reads every file and enters every folder: the interpreter may lie in root's home.
_READ_EVERYWHERE = 2


def without_root() -> list[str]:
    """Return the words before a command by which `nobody` runs it, who may still read all files."""
    if os.geteuid() != 0:
        return []
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    lines = Path("/proc/self/status").read_text().splitlines()
    permitted = next(int(line.split()[1], 16) for line in lines if line.startswith("CapPrm:"))
    if permitted >> _READ_EVERYWHERE & 1:  # containers keep some from root
        only = "-all,+dac_read_search"
        words += [f"--inh-caps={only}", f"--ambient-caps={only}"]
    return words


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that none is lost."""
    _prctl(_SUBREAPER, 1)


def end_with_parent(signal: int) -> None:
    """Have the kernel send `signal` to this process when its parent ends."""
    _prctl(_DEATH_SIGNAL, signal)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
