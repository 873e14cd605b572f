"""Calls of decaying_scan.cpp, the scan's C++ kernel for fp32 on a CPU, compiled at first use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from cat_lm.ops.runtime import compiler, threads

_SOURCE = Path(__file__).with_name("decaying_scan.cpp")
SCAN = compiler.Sources("scan", (_SOURCE, *compiler.SHARED))

# Numbers of state, over all steps, below which one thread is faster than waking others.
SMALL = 1 << 16

_INTEGERS = (
    *("threads", "rows", "time", "heads", "keys", "values", "every", "models"),
    *("rate_keys", "rate_values", "a_heads", "a_keys", "a_values"),
)
_POINTERS = (
    *("q", "k", "v", "rate", "a", "initial", "out", "last", "kept", "grad", "grad_last"),
    *("dq", "dk", "dv", "drate", "da", "dinitial", "workspace", "parallel"),
)


class _Call(ctypes.Structure):
    """`ScanCall` of decaying_scan.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class Kernel:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL):
        self._run, self._workspace = library.scan_run, library.scan_workspace
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Call)], None
        self._workspace.argtypes, self._workspace.restype = self._run.argtypes, ctypes.c_int64

    def forward(self, every: int, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute outputs [M, B, T, H, V], the last state [M, B, H, K, V] and the kept ones
        [M, B, T/every up, H, K, V].
        """
        q, k, v, rate, a, initial = (s.resolve_neg().contiguous() for s in inputs)
        models, batch, time, heads, keys = q.shape
        out, last = torch.empty_like(v), torch.empty_like(initial)
        kept = q.new_empty(models, batch, -(-time // every), heads, keys, v.shape[-1])
        given = {"q": q, "k": k, "v": v, "rate": rate, "a": a, "initial": initial}
        self._call(every, **given, out=out, last=last, kept=kept)
        return out, last, kept

    def backward(
        self, every: int, kept: Tensor, grad: Tensor, grad_last: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of q, k, v, rate, a and the initial state."""
        q, k, v, rate, a = (s.resolve_neg().contiguous() for s in inputs)
        grad, grad_last = (s.resolve_neg().contiguous() for s in (grad, grad_last))
        dq, dk, dv = (torch.empty_like(s) for s in (q, k, v))
        drate = torch.zeros_like(rate)
        models, batch, _, heads, _ = q.shape
        da = a.new_zeros(models, batch, heads, *a.shape[2:])
        dinitial = torch.empty_like(grad_last)
        gradients = {"dq": dq, "dk": dk, "dv": dv, "drate": drate, "da": da, "dinitial": dinitial}
        tensors = {"q": q, "k": k, "v": v, "rate": rate, "a": a, **gradients}
        self._call(every, kept=kept.contiguous(), grad=grad, grad_last=grad_last, **tensors)
        return dq, dk, dv, drate, da.sum(dim=1).sum_to_size(a.shape), dinitial

    def _call(self, every: int, **tensors: Tensor) -> None:
        q, v, rate, a = (tensors[name] for name in ("q", "v", "rate", "a"))
        models, batch, time, heads, keys = q.shape
        values = v.shape[-1]
        small = q.numel() * values < SMALL
        call = _Call(1 if small else torch.get_num_threads(), models * batch, time, heads, keys)
        call.values, call.every, call.models = values, every, models
        call.rate_keys, call.rate_values = rate.shape[-2:]
        call.a_heads, call.a_keys, call.a_values = a.shape[-3:]
        for name, tensor in tensors.items():
            setattr(call, name, tensor.data_ptr())
        call.parallel = threads.runtime()
        pointer = ctypes.byref(call)
        workspace = q.new_empty(call.threads * self._workspace(pointer))
        call.workspace = workspace.data_ptr()
        self._run(pointer)


@functools.cache
def load_kernel() -> Kernel | None:
    """The kernel, or None where it cannot be built; `load_library(SCAN).reason` says why."""
    library = compiler.load_library(SCAN).handle
    return None if library is None else Kernel(library)
