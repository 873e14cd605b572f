"""Keep the host's memory that tensors leave: the next ones take it as it is."""

from __future__ import annotations

import ctypes
import os

# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _MAPPED = 2**31 - 1, 2**30  # bytes: above them, memory is given back
_OWN_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the rest of the process.

    It gives large blocks back to the system, which clears each page again when the next tensor
    takes it: on a CPU, up to a third of a small model's step.

    Returns:
        Whether it does: not with another C library, and not where the environment has a choice of
        its own.
    """
    if any(name in os.environ for name in _OWN_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAPPED) and mallopt(_TRIM_THRESHOLD, _KEPT))
