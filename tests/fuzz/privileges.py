"""Gives up root before anything odd is run, so that `/dev`, `/proc` and other files stay safe."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NOBODY = 65534
_KEEP_CAPABILITIES, _DUMPABLE, _AMBIENT, _SUBREAPER, _DEATH_SIGNAL = 8, 4, 47, 36, 1
_RAISE = 2
# Reads every file and enters every folder: the interpreter may lie in root's home.
_READ_EVERYWHERE = 2
_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


def drop_root() -> None:
    """Becomes the user `nobody`, who may read everything and write only what is given to them.

    Does nothing for another user than root. Raises OSError where the system does not allow it.
    """
    if os.geteuid() != 0:
        return
    _prctl(_KEEP_CAPABILITIES, 1)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    mask = (1 << _READ_EVERYWHERE) & _permitted()
    sets = (_Sets * 2)(_Sets(mask, mask, mask), _Sets())
    header = _Header(_VERSION_3, 0)
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")
    if mask:
        _prctl(_AMBIENT, _RAISE, _READ_EVERYWHERE)  # for programs that are started
    _prctl(_DUMPABLE, 1)  # or its own /proc entries would be root's


def _permitted() -> int:
    """The capabilities that this process may use; containers keep some from root."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapPrm:"))


def adopt_orphans() -> None:
    """Becomes the parent of processes whose own parent ends, so that none is lost."""
    _prctl(_SUBREAPER, 1)


def end_with_parent(signal: int) -> None:
    """Has the kernel send `signal` to this process when its parent ends."""
    _prctl(_DEATH_SIGNAL, signal)


def _prctl(option: int, *values: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, *(*values, 0, 0, 0, 0)[:4]):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
