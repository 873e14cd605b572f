"""The backend for CPU tensors: a C++ kernel (`kernel.cpp`), compiled at first use.

Where no C++ compiler is at hand, or it fails, plain torch computes the same, lag by lag. The choice
is made inside of the operator, so nothing is built while torch.compile traces. Sums, also those of
the gradients, are in fp32 (fp64 for fp64), in an order that does not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import reference
from cat_lm.ops.convolution.kinds.operators import (
    convolution_operator,
    empty_gradients,
    empty_packed_gradients,
    packed_operator,
)
from cat_lm.ops.runtime.compiler import SHARED, Sources
from cat_lm.ops.runtime.native import Kernel
from cat_lm.ops.runtime.precision import at_least_fp32

_FILES = ("kernel.cpp", "call.h", "plan.h", "tiles.h", "worker.h")
# By their numbers in kernel.cpp.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# The kinds of which an item has all channels of a head, which a rotation mixes.
OF_WHOLE_HEADS = ("head", "multihead")
# `ConvolutionCall` of call.h; `work` is the products of x and filters.
SOURCES = Sources("convolution", (*(Path(__file__).with_name(n) for n in _FILES), *SHARED))
KERNEL = Kernel(
    "convolution",
    SOURCES,
    integers=(
        *("dtype", "kind", "threads", "batch", "time", "heads", "width", "window"),
        *("rotated", "angle_rows"),
    ),
    strided=("x", "dy", "out"),
    pointers=(
        *("x", "dy", "filters", "bias", "positions", "cosines", "sines", "out"),
        *("filter_gradient", "bias_gradient", "workspace"),
    ),
    small=1 << 18,
)


def _empty_output(conv_type: str, x: Tensor) -> Tensor:
    """Return an empty y, laid out as [B, H, T, D] for attention."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _forward(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    out = _empty_output(conv_type, x)
    if not KERNEL.is_built:
        y = reference.convolve(conv_type, x, filters, bias, positions)
        return out.copy_(y if cos is None else reference.rotate(y, cos, sin))
    _run(conv_type, filters, positions, cos, sin, x=x, out=out, bias=bias)
    return out


def _backward(
    conv_type: str, dy: Tensor, x: Tensor, filters: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *others, wanted = others
    found = empty_gradients(x, filters, wanted)
    _differentiate(conv_type, dy, x, filters, others, wanted, found)
    return tuple(found)


def _differentiate(
    conv_type: str,
    dy: Tensor,
    x: Tensor,
    filters: Tensor,
    others: Sequence[Tensor | None],
    wanted: Sequence[bool],
    found: Sequence[Tensor],
) -> None:
    """Compute the gradients of x, filters and bias that are wanted, into `found`.

    Args:
        others: positions, cosines and sines.
    """
    if not any(wanted):
        return
    if KERNEL.is_built:
        dx, df, db = (g if want else None for g, want in zip(found, wanted, strict=True))
        given = {"x": x, "dy": dy, "out": dx, "filter_gradient": df, "bias_gradient": db}
        return _run(conv_type, filters, *others, **given)
    positions, cos, sin = others
    if cos is not None:  # The transposed rotation takes each sine from the other half.
        dy = reference.rotate(dy, cos, -sin.roll(sin.shape[-1] // 2, dims=-1))
    made = reference.gradients(conv_type, dy, x, filters, positions)
    for g, gradient, want in zip(found, made, wanted, strict=True):
        if want:
            g.copy_(gradient)


def _run(
    conv_type: str,
    filters: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    **tensors: Tensor | None,
) -> None:
    x, window = tensors["x"], kinds.get(conv_type).window_of(filters)
    numbers = dict(zip(("batch", "time", "heads", "width"), x.shape, strict=True))
    numbers |= {"dtype": DTYPES[x.dtype], "kind": kinds.KERNEL_NUMBERS[conv_type]}
    if cos is not None:
        numbers |= {"rotated": cos.shape[-1], "angle_rows": cos.shape[0]}
        sums = at_least_fp32(x)
        tensors |= {"cosines": cos.to(sums), "sines": sin.to(sums)}
    tensors |= {"filters": filters, "positions": positions}
    KERNEL(tensors, work=x.numel() * window, window=window, **numbers)


cpu_conv = convolution_operator("cpu_conv", _forward, _backward, _empty_output)


def convolve(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute as `reference.convolve`; all tensors have one dtype, and positions are int32.

    Args:
        rotary: (cos, sin), [B or 1, T, R], by which results of the kinds that rotate are rotated
            before they are rounded; they get no gradient.

    Returns:
        y [B, T, H, D]; [B, H, T, D] in memory, as attention reads it.
    """
    return cpu_conv(conv_type, x, filters, bias, positions, *(rotary or (None, None)))


def _forward_packed(
    conv_type: str,
    qkv: Tensor,
    filters: Sequence[Tensor | None],
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, ...]:
    made = []
    for s, (x, taps) in enumerate(zip(qkv.unbind(3), filters, strict=True)):
        own = None if bias is None else bias[:, s]
        how = (cos, sin) if s < 2 else (None, None)
        made.append(_forward(*_stream(conv_type, x, taps), own, positions, *how))
    return tuple(made)


def _backward_packed(
    conv_type: str,
    gradients: Sequence[Tensor],
    qkv: Tensor,
    filters: Sequence[Tensor | None],
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    found = empty_packed_gradients(qkv, filters, wanted)
    dx, *df, db = found
    for s, (x, taps) in enumerate(zip(qkv.unbind(3), filters, strict=True)):
        own = [wanted[0], wanted[1] and taps is not None, wanted[2]]
        to = [dx[:, :, :, s] if own[0] else dx, df[s], db.new_empty(x.shape[2:]) if own[2] else db]
        others = [positions, *((cos, sin) if s < 2 else (None, None))]
        kind, _, taps = _stream(conv_type, x, taps)
        _differentiate(kind, gradients[s], x, taps, others, own, to)
        if own[2]:
            db[:, s] = to[2]
    return tuple(found)


def _stream(conv_type: str, x: Tensor, filters: Tensor | None) -> tuple[str, Tensor, Tensor]:
    """Return kind, inputs and filters of a stream; one without filters has one tap of 1."""
    if filters is not None:
        return conv_type, x, filters
    return kinds.HEAD.name, x, x.new_ones(x.shape[2], 1)


cpu_conv_qkv = packed_operator("cpu_conv_qkv", _forward_packed, _backward_packed, _empty_output)


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
