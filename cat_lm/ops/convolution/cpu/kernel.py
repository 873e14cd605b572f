"""Calls of the C++ kernel (`kernel.cpp`): every convolution, forward and backward."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.runtime.compiler import SHARED, Library, Sources, load_library
from cat_lm.ops.runtime.threads import runtime

_FILES = ("kernel.cpp", "block.h", "call.h", "pairs.h", "tiles.h")
SOURCES = Sources("convolution", (*(Path(__file__).with_name(name) for name in _FILES), *SHARED))
# By their numbers in kernel.cpp.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

# Products of x and filters below which one thread is faster than waking others.
SMALL = 1 << 18

_Strides = ctypes.c_int64 * 3
_INTEGERS = ("dtype", "kind", "threads", "batch", "time", "heads", "width", "window")
_POINTERS = (
    *("x", "dy", "filters", "bias", "positions", "out"),
    *("filter_gradient", "bias_gradient", "workspace", "parallel"),
)


class _Call(ctypes.Structure):
    """`ConvolutionCall` of call.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((f"{name}_strides", _Strides) for name in ("x", "dy", "out")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class Kernel:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL):
        self._run = library.convolution_run
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Call)], None
        self._workspace = library.convolution_workspace
        self._workspace.argtypes, self._workspace.restype = self._run.argtypes, ctypes.c_int64

    def forward(
        self,
        conv_type: str,
        x: Tensor,
        filters: Tensor,
        bias: Tensor | None,
        positions: Tensor | None,
        out: Tensor,
    ) -> None:
        """Writes y to `out`. x and out [B, T, H, D], filters and bias as in `convolve`."""
        self._call(conv_type, x, filters, positions, x=x, out=out, bias=bias)

    def backward(
        self,
        conv_type: str,
        dy: Tensor,
        x: Tensor,
        filters: Tensor,
        positions: Tensor | None,
        dx: Tensor | None,
        filter_gradient: Tensor | None,
        bias_gradient: Tensor | None,
    ) -> None:
        """Writes the gradients that are not None; the last two are contiguous."""
        self._call(
            conv_type,
            x,
            filters,
            positions,
            x=x,
            dy=dy,
            out=dx,
            filter_gradient=filter_gradient,
            bias_gradient=bias_gradient,
        )

    def _call(
        self,
        conv_type: str,
        like: Tensor,
        filters: Tensor,
        positions: Tensor | None,
        **tensors: Tensor | None,
    ) -> None:
        batch, time, heads, width = like.shape
        window = kinds.get(conv_type).window_of(filters)
        threads = 1 if like.numel() * window < SMALL else torch.get_num_threads()
        kind = kinds.KERNEL_NUMBERS[conv_type]
        call = _Call(DTYPES[like.dtype], kind, threads, batch, time, heads, width, window)
        held = []  # copies must outlive the call
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if name in ("x", "dy"):
                tensor = tensor if width == 1 or tensor.stride(3) == 1 else tensor.contiguous()
            elif name == "bias":
                tensor = tensor.contiguous()
            if name in ("x", "dy", "out"):
                setattr(call, f"{name}_strides", _Strides(*tensor.stride()[:3]))
            setattr(call, name, tensor.data_ptr())
            held.append(tensor)
        filters = filters.contiguous()
        call.filters = filters.data_ptr()
        if positions is not None:
            positions = positions.contiguous()
            call.positions = positions.data_ptr()
        call.parallel = runtime()
        pointer = ctypes.byref(call)
        workspace = torch.empty(self._workspace(pointer), dtype=torch.uint8)
        call.workspace = workspace.data_ptr()
        self._run(pointer)


def library() -> Library:
    """The compiled library, built if need be, or the reason why there is none; never raises."""
    return load_library(SOURCES)


def load_kernel() -> Kernel | None:
    """The kernel, or None where it cannot be built; `library().reason` says why."""
    handle = library().handle
    return None if handle is None else _kernel_of(handle)


@functools.cache
def _kernel_of(handle: ctypes.CDLL) -> Kernel:
    return Kernel(handle)
