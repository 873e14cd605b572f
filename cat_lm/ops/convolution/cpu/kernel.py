"""The backend for CPU tensors: a C++ kernel (`kernel.cpp`), compiled at first use.

Where no C++ compiler is at hand, or it fails, plain torch computes the same, lag by lag. The choice
is made inside of the operator, so nothing is built while torch.compile traces. Sums, also those of
the gradients, are in fp32 (fp64 for fp64), in an order that does not depend on the number of
threads.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import reference
from cat_lm.ops.convolution.kinds.operators import convolution_operator, empty_gradients
from cat_lm.ops.runtime.compiler import SHARED, Sources
from cat_lm.ops.runtime.native import Kernel

_FILES = ("kernel.cpp", "block.h", "call.h", "pairs.h", "tiles.h")
# By their numbers in kernel.cpp.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# `ConvolutionCall` of call.h; `work` is the products of x and filters.
SOURCES = Sources("convolution", (*(Path(__file__).with_name(n) for n in _FILES), *SHARED))
KERNEL = Kernel(
    "convolution",
    SOURCES,
    integers=("dtype", "kind", "threads", "batch", "time", "heads", "width", "window"),
    strided=("x", "dy", "out"),
    pointers=(
        *("x", "dy", "filters", "bias", "positions", "out"),
        *("filter_gradient", "bias_gradient", "workspace"),
    ),
    small=1 << 18,
)


def _empty_output(conv_type: str, x: Tensor) -> Tensor:
    """Return an empty y, laid out as [B, H, T, D] for attention unless heads are mixed."""
    if kinds.get(conv_type).mixes_heads:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _forward(
    conv_type: str, x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None, *_
) -> Tensor:
    out = _empty_output(conv_type, x)
    if not KERNEL.is_built:
        return out.copy_(reference.convolve(conv_type, x, filters, bias, positions))
    _run(conv_type, filters, positions, x=x, out=out, bias=bias)
    return out


def _backward(
    conv_type: str, dy: Tensor, x: Tensor, filters: Tensor, positions: Tensor | None, *others
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = others[-1]
    found = empty_gradients(x, filters, wanted)
    if not KERNEL.is_built:
        made = reference.gradients(conv_type, dy, x, filters, positions)
        return tuple(g if want else g.new_empty(0) for g, want in zip(made, wanted, strict=True))
    dx, df, db = (g if want else None for g, want in zip(found, wanted, strict=True))
    given = {"x": x, "dy": dy, "out": dx, "filter_gradient": df, "bias_gradient": db}
    _run(conv_type, filters, positions, **given)
    return tuple(found)


def _run(
    conv_type: str, filters: Tensor, positions: Tensor | None, **tensors: Tensor | None
) -> None:
    x, window = tensors["x"], kinds.get(conv_type).window_of(filters)
    numbers = dict(zip(("batch", "time", "heads", "width"), x.shape, strict=True))
    numbers |= {"dtype": DTYPES[x.dtype], "kind": kinds.KERNEL_NUMBERS[conv_type]}
    tensors |= {"filters": filters, "positions": positions}
    KERNEL(tensors, work=x.numel() * window, window=window, **numbers)


cpu_conv = convolution_operator("cpu_conv", _forward, _backward, _empty_output)


def convolve(
    conv_type: str, x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None
) -> Tensor:
    """Compute as `reference.convolve`; all tensors have one dtype, and positions are int32.

    Returns:
        y [B, T, H, D]; for head and depthwise [B, H, T, D] in memory, as attention reads it.
    """
    return cpu_conv(conv_type, x, filters, bias, positions, None, None)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this backend cannot serve, as a clause, or None if it can."""
    if device.type != "cpu":
        return f"it is for CPU tensors, not {device.type}"
    if dtype not in DTYPES:
        return f"it has no arithmetic for {dtype}"
    return None


def describe(conv_type: str, dtype: torch.dtype, window: int) -> str:
    """Return a description of the kernel and its reason; builds the kernel if needed."""
    built = KERNEL.library()
    if built.handle is not None:
        return f"C++ kernel ({built.reason})"
    return f"{reference.describe(conv_type, dtype, window)}, as {built.reason}"
