"""The convolution per head or channel: of one tensor, or of packed queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution.kinds.operators import empty_gradients
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
    strides,
    unit_stride,
)


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
    if cos is not None and turns_apart(x.dtype, window, per_channel):
        y = forward(conv_type, x, filters, bias, positions, None, None)
        turn(y, y, cos, sin)
        return y
    x, y = unit_stride(x), x.new_empty(x.shape)
    how = {"documents": positions is not None, "rotary": rotated(cos)}
    tile = choose_tile(x, window, per_channel=per_channel, **how)
    each = tile.tiles_per_program(x, most=8 if tile.use_dot else 1)
    with on_device_of(x):
        forward_kernel[tile.grid(x, each)](
            x_ptr=x,
            f_ptr=_for_kernel(filters),
            bias_ptr=contiguous(bias),
            y_ptr=y,
            **strides("x", x, "bth"),
            **_arguments(tile, each, x, window, positions, cos, sin),
            PER_CHANNEL=per_channel,
        )
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
    """Compute dx, df and dbias as far as wanted. Sums are in fp32, in a fixed order."""
    heads, width = x.shape[2:]
    per_channel, window = filters.ndim == 3, filters.shape[-1]
    if cos is not None and turns_apart(x.dtype, window, per_channel):
        dy, cos, sin = rotate(dy, cos, sin, True), None, None
    x, dy = unit_stride(x), unit_stride(dy)
    how = {"documents": positions is not None, "backward": True, "rotary": rotated(cos)}
    tile = choose_tile(x, window, per_channel=per_channel, **how)
    each = tile.tiles_per_program(x, most=2**20) if tile.use_dot else 1
    segments = cdiv(tile.tiles(x), each)
    chunks = cdiv(width, tile.columns) + tile.apart
    dx, df, dbias = empty_gradients(x, filters, wanted)
    sums = bias_sums = None
    if wanted[1]:
        shape = (segments, heads, chunks, tile.block if tile.use_dot else 1, window)
        if per_channel:
            shape = (segments, heads, 1, 1, window, width)
        sums = x.new_empty(shape, dtype=torch.float32)
    if wanted[2]:
        bias_sums = x.new_empty(segments, heads, width, dtype=torch.float32)
    with on_device_of(x):
        backward_kernel[(segments * heads * chunks,)](
            dy_ptr=dy,
            x_ptr=x,
            f_ptr=_for_kernel(filters),
            dx_ptr=dx if wanted[0] else None,
            df_ptr=sums,
            dbias_ptr=bias_sums,
            **strides("dy", dy, "bth"),
            **strides("x", x, "bth"),
            **_arguments(tile, each, x, window, positions, cos, sin),
            PER_CHANNEL=per_channel,
        )
    if sums is not None:
        df = sums.sum(dim=(0, 2, 3))
        df = (df.mT if per_channel else df).to(x.dtype).contiguous()
    return dx, df, dbias if bias_sums is None else bias_sums.sum(dim=0).to(x.dtype)


def _for_kernel(filters: Tensor) -> Tensor:
    """[H, W], or [H, D, W] as [H, W, D], whose channels load as vectors."""
    return (filters.mT if filters.ndim == 3 else filters).contiguous()


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
    sizes = zip(("batch_size", "length", "heads"), x.shape[:3], strict=True)
    return {
        "positions_ptr": contiguous(positions),
        "tiles_per_program": tiles_per_program,
        **dict(sizes),
        "width": x.shape[-1],
        **angle_options(cos, sin),
        "WINDOW": window,
        "BLOCK": tile.block,
        "HALO": tile.halo,
        "COLUMNS": tile.columns,
        "USE_DOT": tile.use_dot,
        **tile.compiler_options(),
    }


def _of_streams(kind: str, tensors: Any) -> dict[str, Any]:
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
    inside = (None, None) if apart else (cos, sin)
    tile = choose_tile(qkv, window, documents=positions is not None, rotary=rotated(inside[0]))
    each = tile.tiles_per_program(qkv, most=8 if tile.use_dot else 1, streams=3)
    with on_device_of(qkv):
        forward_qkv_kernel[tile.grid(qkv, each, streams=3)](
            x_ptr=qkv,
            **_of_streams("_filter", map(contiguous, filters)),
            bias_ptr=contiguous(bias),
            **_of_streams("", outputs),
            **strides("x", qkv, "bths"),
            **_arguments(tile, each, qkv, window, positions, *inside),
        )
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
    needs_qkv: bool,
    needs_filters: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dqkv [B, T, H, 3, D], the filters' and dbias [H, 3, D]; without elements if not needed."""
    heads, width = qkv.shape[2], qkv.shape[4]
    filters, qkv = (q_filter, k_filter, v_filter), unit_stride(qkv)
    window = _window_of(filters)
    if cos is not None and turns_apart(qkv.dtype, window):
        dq, dk = (rotate(gradient, cos, sin, True) for gradient in (dq, dk))
        cos = sin = None
    dq, dk, dv = (unit_stride(gradient) for gradient in (dq, dk, dv))
    how = {"documents": positions is not None, "backward": True, "rotary": rotated(cos)}
    tile = choose_tile(qkv, window, **how)
    each = tile.tiles_per_program(qkv, most=2**20, streams=3) if tile.use_dot else 1
    segments = cdiv(tile.tiles(qkv), each)
    chunks = cdiv(width, tile.columns) + tile.apart
    dqkv = qkv.new_empty(qkv.shape if needs_qkv else 0)
    sums = dbias = None
    if needs_filters:
        shape = (segments, heads, 3, chunks, tile.block if tile.use_dot else 1, window)
        sums = qkv.new_empty(shape, dtype=torch.float32)
    if needs_bias:
        dbias = qkv.new_empty(segments, heads, 3, width, dtype=torch.float32)
    with on_device_of(qkv):
        backward_qkv_kernel[(segments * heads * 3 * chunks,)](
            dq_ptr=dq,
            dk_ptr=dk,
            dv_ptr=dv,
            x_ptr=qkv,
            **_of_streams("_filter", map(contiguous, filters)),
            dx_ptr=dqkv if needs_qkv else None,
            df_ptr=sums,
            dbias_ptr=dbias,
            **strides("dq", dq, "bth"),
            **strides("dk", dk, "bth"),
            **strides("dv", dv, "bth"),
            **strides("x", qkv, "bths"),
            **_arguments(tile, each, qkv, window, positions, cos, sin),
        )
    df = [qkv.new_empty(0) for _ in filters]
    if sums is not None:
        # Sums of streams without a filter were never written, and are not used.
        sums = sums.sum(dim=(0, 3, 4))
        for index, taps in enumerate(filters):
            if taps is not None:
                df[index] = sums[:, index].to(qkv.dtype, copy=True)
    dbias = qkv.new_empty(0) if dbias is None else dbias.sum(dim=0).to(qkv.dtype)
    return dqkv, *df, dbias


@conv_qkv.register_fake
def _(qkv, q_filter, k_filter, v_filter, bias, cos, sin, positions):
    return _empty_streams(qkv)


@conv_qkv_backward.register_fake
def _(dq, dk, dv, qkv, q_filter, k_filter, v_filter, cos, sin, positions, *needs):
    needs_qkv, needs_filters, needs_bias = needs
    filters = (q_filter, k_filter, v_filter)
    shapes = [f.shape if needs_filters and f is not None else 0 for f in filters]
    return (
        qkv.new_empty(qkv.shape if needs_qkv else 0),
        *(qkv.new_empty(shape) for shape in shapes),
        qkv.new_empty(qkv.shape[2:] if needs_bias else 0),
    )


def _setup_context(ctx, inputs, output):
    qkv, q_filter, k_filter, v_filter, bias, cos, sin, positions = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(qkv, q_filter, k_filter, v_filter, cos, sin, positions)


def _backward(ctx, dq, dk, dv):
    qkv, *saved = ctx.saved_tensors
    needs_qkv, *needs_filter = ctx.needs_input_grad[:4]
    needs_bias = ctx.has_bias and ctx.needs_input_grad[4]
    dqkv, *df, dbias = conv_qkv_backward(
        dq, dk, dv, qkv, *saved, needs_qkv, any(needs_filter), needs_bias
    )
    return (
        dqkv if needs_qkv else None,
        *(g if needed else None for g, needed in zip(df, needs_filter, strict=True)),
        *(dbias if needs_bias else None, None, None, None),
    )


conv_qkv.register_autograd(_backward, setup_context=_setup_context)
