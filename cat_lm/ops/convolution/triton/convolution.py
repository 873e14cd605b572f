"""The convolution per head or channel: of one tensor, or of packed queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution.triton.backward import backward_kernel
from cat_lm.ops.convolution.triton.forward import forward_kernel
from cat_lm.ops.convolution.triton.launch import (
    angle_arguments,
    choose_launch,
    rotated,
    rotates_separately,
)
from cat_lm.ops.convolution.triton.rotation import rotate, rotate_into
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    on_device_of,
    unit_stride,
)

Streams = Sequence[Tensor | None]  # one tensor, or those of q, k and v


def _window_of(filters: Streams) -> int:
    """Return W of the convolved streams; 1 if none is."""
    return max((f.shape[-1] for f in filters if f is not None), default=1)


def _arguments(
    x: Tensor, filters: Streams, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> dict[str, Any]:
    """Return what both kernels take; filters per channel as [H, W, D], which load as vectors."""
    filters = [contiguous(f if f is None or f.ndim == 2 else f.mT) for f in filters]
    return {
        "x": (x, *x.stride()[:-1], 0)[:5],
        "filters": _three(filters),
        "positions_ptr": contiguous(positions),
        "angles": angle_arguments(cos, sin),
        "batch_size": x.shape[0],
        "length": x.shape[1],
        "shape": (x.shape[2], x.shape[-1]),
    }


def _three(streams: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a kernel takes for q, k and v; one tensor's is called q's."""
    return (*streams, None, None)[:3]


def _convolve(
    x: Tensor,
    filters: Streams,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute RoPE(F * x + bias) of each stream of x [B, T, H, (3,) D], as [B, T, H, D]."""
    x, window = unit_stride(x), _window_of(filters)
    outputs = tuple(x.new_empty(*x.shape[:3], x.shape[-1]) for _ in filters)
    how = {"per_channel": _per_channel(filters), "documents": positions is not None}
    apart = cos is not None and rotates_separately(x.dtype, window, how["per_channel"])
    angles = (None, None) if apart else (cos, sin)
    launch = choose_launch(x, window, rotary=rotated(angles[0]), **how)
    per_program = launch.tiles_per_program(x, most=8 if launch.tile.use_dot else 1)
    segments = cdiv(launch.tiles(x), per_program)
    with on_device_of(x):
        forward_kernel[(segments * launch.chunks(x) * math.prod(x.shape[2:-1]),)](
            outputs=_three(outputs),
            bias_ptr=contiguous(bias),
            tiles_per_program=per_program,
            **_arguments(x, filters, positions, *angles),
            **launch.options(),
        )
    if apart:
        for stream in outputs[:2]:
            rotate_into(stream, stream, cos, sin)
    return outputs


def _differentiate(
    gradients: Streams,
    x: Tensor,
    filters: Streams,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dx, the sums of df [H, (3,) …, W] in fp32, or None, and dbias, as far as wanted.

    Programs leave their sums apart, and these are summed in a fixed order.
    """
    x, window, per_channel = unit_stride(x), _window_of(filters), _per_channel(filters)
    if cos is not None and rotates_separately(x.dtype, window, per_channel):
        gradients = [rotate(g, cos, sin, True) if i < 2 else g for i, g in enumerate(gradients)]
        cos = sin = None
    how = {"per_channel": per_channel, "documents": positions is not None}
    launch = choose_launch(x, window, backward=True, rotary=rotated(cos), **how)
    tile, lead, width = launch.tile, x.shape[2:-1], x.shape[-1]
    per_program = launch.tiles_per_program(x, most=2**20 if tile.use_dot else 1)
    segments, chunks = cdiv(launch.tiles(x), per_program), launch.chunks(x, backward=True)
    dx = x.new_empty(x.shape if wanted[0] else 0)
    sums = dbias = None
    if wanted[1]:
        shape = (chunks, tile.block if tile.use_dot else 1, window)
        shape = (1, 1, window, width) if per_channel else shape
        sums = x.new_empty(segments, *lead, *shape, dtype=torch.float32)
    if wanted[2]:
        dbias = x.new_empty(segments, *lead, width, dtype=torch.float32)
    gradients = [(g, *g.stride()[:3]) for g in map(unit_stride, gradients)]
    with on_device_of(x):
        backward_kernel[(segments * math.prod(lead) * chunks,)](
            gradients=_three(gradients),
            dx_ptr=dx if wanted[0] else None,
            sums=(sums, dbias),
            tiles_per_program=per_program,
            **_arguments(x, filters, positions, cos, sin),
            **launch.options(),
        )
    if sums is not None:
        sums = sums.sum(dim=(0, 1 + len(lead), 2 + len(lead)))
    return dx, sums, x.new_empty(0) if dbias is None else dbias.sum(dim=0).to(x.dtype)


def _per_channel(filters: Streams) -> bool:
    return filters[0] is not None and filters[0].ndim == 3


def forward(
    conv_type: str, x: Tensor, filters: Tensor, bias: Tensor | None, *others: Tensor | None
) -> Tensor:
    """Compute y[b,t,h,d] = RoPE(bias[h,d] + sum_j F[h,(d,)j] x[b,t−j,h,d]), contiguous."""
    return _convolve(x, [filters], bias, *others)[0]


def backward(
    conv_type: str, dy: Tensor, x: Tensor, filters: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx, df and dbias as far as wanted."""
    dx, sums, dbias = _differentiate([dy], x, [filters], *others)
    if sums is None:
        return dx, x.new_empty(0), dbias
    return dx, (sums.mT if filters.ndim == 3 else sums).to(x.dtype).contiguous(), dbias


def forward_packed(
    conv_type: str, qkv: Tensor, filters: Streams, bias: Tensor | None, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Convolve and rotate packed q, k and v, as `packed_operator` says.

    Results are rotated in fp32 before the one rounding to qkv's dtype; in half precision with
    filters of more than 65 taps, after another. Flash attention and cuDNN's lay their output out as
    their queries, so that what follows copies nothing.
    """
    return _convolve(qkv, filters, bias, *others)


def backward_packed(
    conv_type: str, gradients: Streams, qkv: Tensor, filters: Streams, *others: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients of packed q, k and v, the filters and the bias, as far as wanted."""
    dqkv, sums, dbias = _differentiate(gradients, qkv, filters, *others)
    # Sums of streams without a filter were never written, and are not used.
    df = [
        qkv.new_empty(0) if sums is None or taps is None else sums[:, i].to(qkv.dtype, copy=True)
        for i, taps in enumerate(filters)
    ]
    return dqkv, *df, dbias
