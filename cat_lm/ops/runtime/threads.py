"""The threads of torch, for the C++ kernels (`threads.h`).

`GOMP_parallel` is looked up in libtorch and the libraries that it was linked to, so that the OpenMP
runtime that torch brings is the only one in the process and `torch.set_num_threads` holds. A forked
child must not touch its parent's pool, which OpenMP does not bring along: there, and where torch
has no such runtime, a kernel starts threads of its own for the length of a call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

_forked = False


def _note_the_fork() -> None:
    global _forked
    _forked = True


# At import: a parent may have used torch's pool before it ever calls a kernel.
os.register_at_fork(after_in_child=_note_the_fork)


def runtime() -> int | None:
    """The address of GOMP_parallel in the runtime that torch is linked to, or None."""
    return None if _forked else _openmp_of_torch()


@functools.cache
def _openmp_of_torch() -> int | None:
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
