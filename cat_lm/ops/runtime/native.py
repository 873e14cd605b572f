"""Calls of C++ kernels, which are functions of one struct, with the threads of torch (`threads.h`).

`GOMP_parallel` is looked up in libtorch and the libraries that it was linked to, so that the OpenMP
runtime that torch brings is the only one in the process and `torch.set_num_threads` holds. A forked
child must not touch its parent's pool, which OpenMP does not bring along: there, and where torch
has no such runtime, a kernel starts threads of its own for the length of a call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cat_lm.ops.runtime.compiler import Library, Sources, load_library

_Strides = ctypes.c_int64 * 3
_forked = False


def _note_the_fork() -> None:
    global _forked
    _forked = True


# At import: a parent may have used torch's pool before it ever calls a kernel.
os.register_at_fork(after_in_child=_note_the_fork)


def openmp_runtime() -> int | None:
    """Return the address of GOMP_parallel in the runtime that torch is linked to, or None."""
    return None if _forked else _openmp_of_torch()


@functools.cache
def _openmp_of_torch() -> int | None:
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


class Kernel:
    """The function `<name>_run` of a library, built at first use, that takes one struct.

    The struct has int64 numbers, then int64 strides of tensors' first three dimensions, then
    floats, then pointers, of which the last is `parallel`, what starts torch's threads. Of kernels
    with a `workspace` among the pointers `<name>_workspace` returns its bytes.

    Args:
        integers, strided, floats, pointers: names of the fields; `strided` ones are pointers, too.
        small: numbers of work below which one thread is faster than waking others.
    """

    def __init__(
        self,
        name: str,
        sources: Sources,
        *,
        integers: Sequence[str],
        pointers: Sequence[str],
        strided: Sequence[str] = (),
        floats: Sequence[str] = (),
        small: int,
    ):
        self.name, self.sources, self.strided, self.small = name, sources, strided, small
        self.has_workspace = "workspace" in pointers
        fields = [(field, ctypes.c_int64) for field in integers]
        fields += [(f"{field}_strides", _Strides) for field in strided]
        fields += [(field, ctypes.c_float) for field in floats]
        fields += [(field, ctypes.c_void_p) for field in (*pointers, "parallel")]
        self.struct = type("Call", (ctypes.Structure,), {"_fields_": fields})

    def library(self) -> Library:
        """Return the library, built if need be, or the reason why there is none; never raise."""
        return load_library(self.sources)

    @property
    def is_built(self) -> bool:
        """Return True if the kernel can be called; it may be built now."""
        return self.library().handle is not None

    def __call__(self, tensors: dict[str, Tensor | None], *, work: int, **numbers: float) -> None:
        """Run the kernel.

        Args:
            tensors: by the pointers' names; those that are not strided, and their channels where
                they are, lie side by side in memory, or are copied so.
            work: sets how many threads compute, see `small`.
            numbers: the other fields.
        """
        numbers["threads"] = 1 if work < self.small else torch.get_num_threads()
        call, handle = self.struct(**numbers), self.library().handle
        held = []  # Keep copies alive during the call.
        for name, x in tensors.items():
            if x is None:
                continue
            x = x.resolve_neg()
            if name not in self.strided:
                x = x.contiguous()
            else:
                x = x if x.shape[3] == 1 or x.stride(3) == 1 else x.contiguous()
                setattr(call, f"{name}_strides", _Strides(*x.stride()[:3]))
            setattr(call, name, x.data_ptr())
            held.append(x)
        call.parallel, pointer = openmp_runtime(), ctypes.byref(call)
        if self.has_workspace:
            size = _function(handle, f"{self.name}_workspace", ctypes.c_int64)(pointer)
            workspace = torch.empty(size, dtype=torch.uint8)
            call.workspace = workspace.data_ptr()
        _function(handle, f"{self.name}_run", None)(pointer)


@functools.cache
def _function(handle: ctypes.CDLL, name: str, result: type | None) -> ctypes._CFuncPtr:
    found = getattr(handle, name)
    found.argtypes, found.restype = [ctypes.c_void_p], result
    return found
