"""The convolution per head or channel: of one tensor, or of packed queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution.triton.backward import backward_kernel
from cat_lm.ops.convolution.triton.backward_qkv import backward_qkv_kernel
from cat_lm.ops.convolution.triton.forward import forward_kernel, forward_qkv_kernel
from cat_lm.ops.convolution.triton.launch import (
    Tile,
    angle_options,
    choose_tile,
    rotated,
    turns_apart,
)
from cat_lm.ops.convolution.triton.rotation import rotate, turn
from cat_lm.ops.runtime.operators import custom_op
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    on_device_of,
    pointers,
    strides,
    unit_stride,
)

# What the launches below share: `lead` is [H] of x [B, T, H, D] and [H, 3] of [B, T, H, 3, D].


def _launch_forward(
    kernel: Any,
    given: dict[str, Any],
    x: Tensor,
    window: int,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    per_channel: bool = False,
) -> None:
    how = {"documents": positions is not None, "rotary": rotated(cos)}
    tile = choose_tile(x, window, per_channel=per_channel, **how)
    streams = math.prod(x.shape[3:-1])
    per_program = tile.tiles_per_program(x, most=8 if tile.use_dot else 1, streams=streams)
    with on_device_of(x):
        kernel[tile.grid(x, per_program, streams)](
            **given, **_arguments(tile, per_program, x, window, positions, cos, sin)
        )


def _launch_backward(
    kernel: Any,
    given: dict[str, Any],
    x: Tensor,
    window: int,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    wanted: list[bool],
    per_channel: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dx, the sums of df [*lead, …, W] in fp32, or None, and dbias, as far as wanted.

    Programs leave their sums apart, and these are summed in a fixed order.
    """
    how = {"documents": positions is not None, "backward": True, "rotary": rotated(cos)}
    tile = choose_tile(x, window, per_channel=per_channel, **how)
    lead, width = x.shape[2:-1], x.shape[-1]
    most = 2**20 if tile.use_dot else 1
    per_program = tile.tiles_per_program(x, most, streams=math.prod(lead[1:]))
    segments = cdiv(tile.tiles(x), per_program)
    chunks = cdiv(width, tile.columns) + tile.apart
    dx = x.new_empty(x.shape if wanted[0] else 0)
    sums = dbias = None
    if wanted[1]:
        shape = (chunks, tile.block if tile.use_dot else 1, window)
        shape = (1, 1, window, width) if per_channel else shape
        sums = x.new_empty(segments, *lead, *shape, dtype=torch.float32)
    if wanted[2]:
        dbias = x.new_empty(segments, *lead, width, dtype=torch.float32)
    with on_device_of(x):
        kernel[(segments * math.prod(lead) * chunks,)](
            **given,
            **pointers(dx=dx if wanted[0] else None, df=sums, dbias=dbias),
            **_arguments(tile, per_program, x, window, positions, cos, sin),
        )
    if sums is not None:
        sums = sums.sum(dim=(0, 1 + len(lead), 2 + len(lead)))
    dbias = x.new_empty(0) if dbias is None else dbias.sum(dim=0).to(x.dtype)
    return dx, sums, dbias


def _arguments(
    tile: Tile,
    tiles_per_program: int,
    x: Tensor,
    window: int,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> dict[str, Any]:
    """Return what all four kernels take."""
    return {
        "positions_ptr": contiguous(positions),
        "tiles_per_program": tiles_per_program,
        **dict(zip(("batch_size", "length", "heads"), x.shape[:3], strict=True)),
        "width": x.shape[-1],
        **angle_options(cos, sin),
        "WINDOW": window,
        "BLOCK": tile.block,
        "HALO": tile.halo,
        "COLUMNS": tile.columns,
        "USE_DOT": tile.use_dot,
        **tile.compiler_options(),
    }


def forward(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Compute y[b,t,h,d] = RoPE(bias[h,d] + sum_j F[h,(d,)j] x[b,t−j,h,d]), contiguous."""
    per_channel, window = filters.ndim == 3, filters.shape[-1]
    apart = cos is not None and turns_apart(x.dtype, window, per_channel)
    x, y = unit_stride(x), x.new_empty(x.shape)
    given = pointers(x=x, f=_for_kernel(filters), bias=contiguous(bias), y=y)
    given |= strides("x", x, "bth") | {"PER_CHANNEL": per_channel}
    angles = (None, None) if apart else (cos, sin)
    _launch_forward(forward_kernel, given, x, window, positions, *angles, per_channel)
    if apart:
        turn(y, y, cos, sin)
    return y


def backward(
    conv_type: str,
    dy: Tensor,
    x: Tensor,
    filters: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx, df and dbias as far as wanted."""
    per_channel, window = filters.ndim == 3, filters.shape[-1]
    if cos is not None and turns_apart(x.dtype, window, per_channel):
        dy, cos, sin = rotate(dy, cos, sin, True), None, None
    x, dy = unit_stride(x), unit_stride(dy)
    given = pointers(dy=dy, x=x, f=_for_kernel(filters)) | {"PER_CHANNEL": per_channel}
    given |= strides("dy", dy, "bth") | strides("x", x, "bth")
    dx, sums, dbias = _launch_backward(
        backward_kernel, given, x, window, positions, cos, sin, wanted, per_channel
    )
    if sums is None:
        return dx, x.new_empty(0), dbias
    return dx, (sums.mT if per_channel else sums).to(x.dtype).contiguous(), dbias


def _for_kernel(filters: Tensor) -> Tensor:
    """[H, W], or [H, D, W] as [H, W, D], whose channels load as vectors."""
    return (filters.mT if filters.ndim == 3 else filters).contiguous()


def _of_streams(kind: str, tensors: Iterable[Tensor | None]) -> dict[str, Tensor | None]:
    """Name what a kernel takes for each of q, k and v."""
    return {f"{stream}{kind}_ptr": x for stream, x in zip("qkv", tensors, strict=True)}


def _empty_streams(qkv: Tensor) -> tuple[Tensor, ...]:
    """Return room for q, k and v, each [B, T, H, D]."""
    batch, time, heads, streams, width = qkv.shape
    return tuple(qkv.new_empty(batch, time, heads, width) for _ in range(streams))


def _window_of(filters: tuple[Tensor | None, ...]) -> int:
    """Return W of the convolved streams; 1 if none is."""
    return max((f.shape[-1] for f in filters if f is not None), default=1)


@custom_op("cat_lm::triton_conv_qkv")
def conv_qkv(
    qkv: Tensor,
    q_filter: Tensor | None,
    k_filter: Tensor | None,
    v_filter: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y_s = RoPE_s(F_s * x_s + b_s) for s in q, k, v, with RoPE on q and k alone.

    Args:
        qkv: [B, T, H, 3, D].
        q_filter, k_filter, v_filter: [H, W] of qkv's dtype; None leaves a stream as it is.
        bias: [H, 3, D].
        cos, sin: [B or 1, T, R], without a gradient; the first R channels are rotated by halves.
        positions: int32 [B, T].

    Returns:
        q, k, v, each [B, T, H, D]. Flash attention and cuDNN's lay their output out as their
        queries; so it is what follows attention's transpose, which then copies nothing.
    """
    filters, qkv = (q_filter, k_filter, v_filter), unit_stride(qkv)
    window, outputs = _window_of(filters), _empty_streams(qkv)
    apart = cos is not None and turns_apart(qkv.dtype, window)
    given = pointers(x=qkv, bias=contiguous(bias)) | strides("x", qkv, "bths")
    given |= _of_streams("_filter", map(contiguous, filters)) | _of_streams("", outputs)
    angles = (None, None) if apart else (cos, sin)
    _launch_forward(forward_qkv_kernel, given, qkv, window, positions, *angles)
    if apart:
        for stream in outputs[:2]:
            turn(stream, stream, cos, sin)
    return outputs


@custom_op("cat_lm::triton_conv_qkv_backward")
def conv_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_filter: Tensor | None,
    k_filter: Tensor | None,
    v_filter: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute dqkv [B, T, H, 3, D], the filters' and dbias [H, 3, D]; no numbers if not wanted."""
    filters, qkv = (q_filter, k_filter, v_filter), unit_stride(qkv)
    window = _window_of(filters)
    if cos is not None and turns_apart(qkv.dtype, window):
        dq, dk = (rotate(gradient, cos, sin, True) for gradient in (dq, dk))
        cos = sin = None
    gradients = [unit_stride(gradient) for gradient in (dq, dk, dv)]
    given = pointers(x=qkv) | _of_streams("_filter", map(contiguous, filters))
    for stream, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        given |= pointers(**{stream: gradient}) | strides(stream, gradient, "bth")
    given |= strides("x", qkv, "bths")
    dqkv, sums, dbias = _launch_backward(
        backward_qkv_kernel, given, qkv, window, positions, cos, sin, wanted
    )
    # Sums of streams without a filter were never written, and are not used.
    df = [
        qkv.new_empty(0) if sums is None or taps is None else sums[:, i].to(qkv.dtype, copy=True)
        for i, taps in enumerate(filters)
    ]
    return dqkv, *df, dbias


@conv_qkv.register_fake
def _(qkv, q_filter, k_filter, v_filter, bias, cos, sin, positions):
    return _empty_streams(qkv)


@conv_qkv_backward.register_fake
def _(dq, dk, dv, qkv, q_filter, k_filter, v_filter, cos, sin, positions, wanted):
    filters = (q_filter, k_filter, v_filter)
    shapes = [f.shape if wanted[1] and f is not None else 0 for f in filters]
    shapes = [qkv.shape if wanted[0] else 0, *shapes, qkv.shape[2:] if wanted[2] else 0]
    return tuple(qkv.new_empty(shape) for shape in shapes)


def _setup_context(ctx, inputs, output):
    qkv, q_filter, k_filter, v_filter, bias, cos, sin, positions = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(qkv, q_filter, k_filter, v_filter, cos, sin, positions)


def _backward(ctx, dq, dk, dv):
    needs = [*ctx.needs_input_grad[:4], ctx.has_bias and ctx.needs_input_grad[4]]
    wanted = [needs[0], any(needs[1:4]), needs[4]]
    found = conv_qkv_backward(dq, dk, dv, *ctx.saved_tensors, wanted)
    found = (g if needed else None for g, needed in zip(found, needs, strict=True))
    return *found, None, None, None


conv_qkv.register_autograd(_backward, setup_context=_setup_context)
