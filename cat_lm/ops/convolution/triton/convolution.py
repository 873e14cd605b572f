"""The convolution per head or channel as an operator of torch: cat_lm::triton_conv."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution.triton.backward import backward_kernel
from cat_lm.ops.convolution.triton.forward import forward_kernel
from cat_lm.ops.convolution.triton.launch import (
    angle_options,
    choose_tile,
    rotated,
    turns_apart,
)
from cat_lm.ops.convolution.triton.rotation import rotate, turn
from cat_lm.ops.runtime import vmap_rules
from cat_lm.ops.runtime.operators import custom_op
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    on_device_of,
    strides,
    unit_stride,
)


def _for_kernel(filters: Tensor) -> Tensor:
    """[H, W], or [H, D, W] as [H, W, D], whose channels load as vectors."""
    return (filters.mT if filters.ndim == 3 else filters).contiguous()


@custom_op("cat_lm::triton_conv")
def conv(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """y[b,t,h,d] = RoPE(bias[h,d] + sum_j F[h,(d,)j] x[b,t−j,h,d]).

    Args:
        x: [B, T, H, D].
        filters: [H, W] or [H, D, W], of x's dtype.
        bias: [H, D], of x's dtype.
        positions: int32 [B, T]; an input j steps back counts if j is at most the position.
        cos, sin: [B or 1, T, R], without a gradient; the first R channels are turned by halves.

    Returns:
        [B, T, H, D], contiguous.
    """
    batch, time, heads, width = x.shape
    per_channel, window = filters.ndim == 3, filters.shape[-1]
    if cos is not None and turns_apart(x.dtype, window, per_channel):
        y = conv(x, filters, bias, positions, None, None)
        turn(y, y, cos, sin)
        return y
    x, y = unit_stride(x), x.new_empty(x.shape)
    how = {"documents": positions is not None, "rotary": rotated(cos)}
    tile = choose_tile(x, window, per_channel=per_channel, **how)
    tiles_per_program = tile.tiles_per_program(x, most=8 if tile.use_dot else 1)
    with on_device_of(x):
        forward_kernel[tile.grid(x, tiles_per_program)](
            x_ptr=x,
            f_ptr=_for_kernel(filters),
            bias_ptr=contiguous(bias),
            y_ptr=y,
            positions_ptr=contiguous(positions),
            tiles_per_program=tiles_per_program,
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("x", x, "bth"),
            **angle_options(cos, sin),
            WINDOW=window,
            BLOCK=tile.block,
            HALO=tile.halo,
            COLUMNS=tile.columns,
            PER_CHANNEL=per_channel,
            USE_DOT=tile.use_dot,
            **tile.compiler_options(),
        )
    return y


@custom_op("cat_lm::triton_conv_backward")
def conv_backward(
    dy: Tensor,
    x: Tensor,
    filters: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    needs_x: bool,
    needs_filters: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, df and dbias; what is not needed has no elements. Sums are in fp32, in a fixed order."""
    batch, time, heads, width = x.shape
    per_channel, window = filters.ndim == 3, filters.shape[-1]
    if cos is not None and turns_apart(x.dtype, window, per_channel):
        dy, cos, sin = rotate(dy, cos, sin, True), None, None
    x, dy = unit_stride(x), unit_stride(dy)
    how = {"documents": positions is not None, "backward": True, "rotary": rotated(cos)}
    tile = choose_tile(x, window, per_channel=per_channel, **how)
    tiles_per_program = tile.tiles_per_program(x, most=2**20) if tile.use_dot else 1
    angles = angle_options(cos, sin)
    segments = cdiv(tile.tiles(x), tiles_per_program)
    chunks = cdiv(width, tile.columns) + tile.apart
    dx = x.new_empty(x.shape if needs_x else 0)
    sums = dbias = None
    if needs_filters:
        if per_channel:
            shape = (segments, heads, 1, 1, window, width)
        else:
            shape = (segments, heads, chunks, tile.block if tile.use_dot else 1, window)
        sums = x.new_empty(shape, dtype=torch.float32)
    if needs_bias:
        dbias = x.new_empty(segments, heads, width, dtype=torch.float32)
    with on_device_of(x):
        backward_kernel[(segments * heads * chunks,)](
            dy_ptr=dy,
            x_ptr=x,
            f_ptr=_for_kernel(filters),
            dx_ptr=dx if needs_x else None,
            df_ptr=sums,
            dbias_ptr=dbias,
            positions_ptr=contiguous(positions),
            tiles_per_program=tiles_per_program,
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("dy", dy, "bth"),
            **strides("x", x, "bth"),
            **angles,
            WINDOW=window,
            BLOCK=tile.block,
            HALO=tile.halo,
            COLUMNS=tile.columns,
            PER_CHANNEL=per_channel,
            USE_DOT=tile.use_dot,
            **tile.compiler_options(),
        )
    df = x.new_empty(0)
    if sums is not None:
        df = sums.sum(dim=(0, 2, 3))
        df = (df.mT if per_channel else df).to(x.dtype).contiguous()
    dbias = x.new_empty(0) if dbias is None else dbias.sum(dim=0).to(x.dtype)
    return dx, df, dbias


@conv.register_fake
def _(x, filters, bias, positions, cos, sin):
    return x.new_empty(x.shape)


@conv_backward.register_fake
def _(dy, x, filters, positions, cos, sin, needs_x, needs_filters, needs_bias):
    return (
        x.new_empty(x.shape if needs_x else 0),
        x.new_empty(filters.shape if needs_filters else 0),
        x.new_empty(x.shape[2:] if needs_bias else 0),
    )


def _setup_context(ctx, inputs, output):
    x, filters, bias, *others = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, filters, *others)


def _backward(ctx, dy):
    needs = (*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2])
    found = conv_backward(dy, *ctx.saved_tensors, *needs)
    found = (gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
    return *found, None, None, None


conv.register_autograd(_backward, setup_context=_setup_context)


@conv.register_vmap
def _(info, axes, *tensors):
    if tensors[4] is not None:
        return vmap_rules.in_turn(info.batch_size, axes, conv, tensors)

    def apply(*tensors):
        return conv(*tensors, None, None)

    return vmap_rules.forward(info.batch_size, axes[:4], apply, *tensors[:4], mixes_heads=False)


@conv_backward.register_vmap
def _(info, axes, *arguments):
    tensors, needs = arguments[:6], arguments[6:]
    if tensors[4] is not None:

        def apply(*tensors):
            return conv_backward(*tensors, *needs)

        return vmap_rules.in_turn(info.batch_size, axes[:6], apply, tensors)

    def apply(*tensors):
        return conv_backward(*tensors, None, None, *needs)

    return vmap_rules.backward(info.batch_size, axes[:4], apply, *tensors[:4], mixes_heads=False)
