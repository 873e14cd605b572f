"""Packed queries, keys and values at once, each way: cat_lm::triton_conv_qkv."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cat_lm.ops.convolution.triton.backward_qkv import backward_qkv_kernel
from cat_lm.ops.convolution.triton.forward import forward_qkv_kernel
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


def _window(*filters: Tensor | None) -> int:
    """W of the convolved streams; 1 if none is."""
    return max((f.shape[-1] for f in filters if f is not None), default=1)


def _pointers(kind: str, tensors: Iterable[Tensor | None]) -> dict[str, Tensor | None]:
    """Name what a kernel takes for each of q, k and v."""
    return {f"{stream}{kind}_ptr": x for stream, x in zip("qkv", tensors, strict=True)}


def _streams(qkv: Tensor) -> tuple[Tensor, ...]:
    """Room for q, k and v, each [B, T, H, D]."""
    batch, time, heads, streams, width = qkv.shape
    return tuple(qkv.new_empty(batch, time, heads, width) for _ in range(streams))


def _tile_options(tile: Tile) -> dict[str, int]:
    return {
        "BLOCK": tile.block,
        "HALO": tile.halo,
        "COLUMNS": tile.columns,
        "USE_DOT": tile.use_dot,
        **tile.compiler_options(),
    }


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
    """y_s = RoPE_s(F_s * x_s + b_s) for s in q, k, v, with RoPE on q and k alone.

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
    batch, time, heads, _, width = qkv.shape
    filters = (q_filter, k_filter, v_filter)
    window, qkv = _window(*filters), unit_stride(qkv)
    if cos is not None and turns_apart(qkv.dtype, window):
        outputs = conv_qkv(qkv, *filters, bias, None, None, positions)
        for stream in outputs[:2]:
            turn(stream, stream, cos, sin)
        return outputs
    outputs = _streams(qkv)
    tile = choose_tile(qkv, window, documents=positions is not None, rotary=rotated(cos))
    tiles_per_program = tile.tiles_per_program(qkv, most=8 if tile.use_dot else 1, streams=3)
    with on_device_of(qkv):
        forward_qkv_kernel[tile.grid(qkv, tiles_per_program, streams=3)](
            x_ptr=qkv,
            **_pointers("_filter", map(contiguous, filters)),
            bias_ptr=contiguous(bias),
            **_pointers("", outputs),
            positions_ptr=contiguous(positions),
            tiles_per_program=tiles_per_program,
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("x", qkv, "bths"),
            WINDOW=window,
            **angle_options(cos, sin),
            **_tile_options(tile),
        )
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
    batch, time, heads, _, width = qkv.shape
    filters = (q_filter, k_filter, v_filter)
    window, qkv = _window(*filters), unit_stride(qkv)
    if cos is not None and turns_apart(qkv.dtype, window):
        dq, dk = (rotate(gradient, cos, sin, True) for gradient in (dq, dk))
        cos = sin = None
    dq, dk, dv = (unit_stride(gradient) for gradient in (dq, dk, dv))
    how = {"documents": positions is not None, "backward": True, "rotary": rotated(cos)}
    tile = choose_tile(qkv, window, **how)
    tiles_per_program = tile.tiles_per_program(qkv, most=2**20, streams=3) if tile.use_dot else 1
    angles = angle_options(cos, sin)
    segments = cdiv(tile.tiles(qkv), tiles_per_program)
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
            **_pointers("_filter", map(contiguous, filters)),
            dx_ptr=dqkv if needs_qkv else None,
            df_ptr=sums,
            dbias_ptr=dbias,
            positions_ptr=contiguous(positions),
            tiles_per_program=tiles_per_program,
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("dq", dq, "bth"),
            **strides("dk", dk, "bth"),
            **strides("dv", dv, "bth"),
            **strides("x", qkv, "bths"),
            WINDOW=window,
            **angles,
            **_tile_options(tile),
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
    return _streams(qkv)


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
