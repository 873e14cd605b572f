"""The multi-head convolution as an operator of torch: cat_lm::triton_multihead_conv."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution.triton import launch
from cat_lm.ops.convolution.triton.multihead_kernels import mix_filters_kernel, mix_kernel
from cat_lm.ops.convolution.triton.rotation import rotate, turn
from cat_lm.ops.runtime import vmap_rules
from cat_lm.ops.runtime.operators import custom_op
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    next_power_of_2,
    on_device_of,
    strides,
    unit_stride,
)

HEADS = 16
# Programs that share the sum over blocks in dF; each leaves STEPS · W · H² numbers.
PARTS = 64


def mix_options(x: Tensor, window: int, documents: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `mix_kernel` and what its compiler is told.

    128 rows by 256 columns are a tile of a fast matrix product; with documents the matrix differs
    by block, so that no two blocks go into one product. fp32 has no matrix units and small tiles.
    """
    half = x.dtype != torch.float32
    columns = min(128 if half else 64, max(16, next_power_of_2(x.shape[-1])))
    constants = {
        "WINDOW": window,
        "STEPS": 8,
        "HEADS": HEADS,
        "INNER": 4 if half else 2,
        "BLOCKS": max(1, 256 // columns) if half and not documents else 1,
        "COLUMNS": columns,
    }
    return constants, _compiler_options(x)


def filter_options(x: Tensor, window: int) -> tuple[dict[str, int], dict[str, int]]:
    """The same for `mix_filters_kernel`."""
    half = x.dtype != torch.float32
    constants = {
        "WINDOW": window,
        "STEPS": 8,
        "HEADS": HEADS,
        "INNER": 8 if half else 4,
        "COLUMNS": 64 if half else 16,
    }
    return constants, _compiler_options(x)


def _compiler_options(x: Tensor) -> dict[str, int]:
    stages = 1
    if x.dtype != torch.float32:
        # Three stages of the products' tiles take up to 96 KiB, more than AMD's GPUs have.
        stages = 3 if launch.shared_memory(x.device) >= 98304 else 2
    return {"num_warps": 8, "num_stages": stages}


def _mix(
    x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None, reverse: bool
) -> Tensor:
    """y = M x + bias, or with `reverse` and filters transposed in their heads, Mᵀ x."""
    batch, time, heads, width = x.shape
    constants, options = mix_options(x, filters.shape[0], positions is not None)
    x, y = unit_stride(x), x.new_empty(x.shape)
    blocks = batch * cdiv(time, constants["STEPS"])
    programs = cdiv(heads, HEADS) * cdiv(width, constants["COLUMNS"])
    programs *= cdiv(blocks, constants["BLOCKS"])
    with on_device_of(x):
        mix_kernel[(programs,)](
            x_ptr=x,
            f_ptr=filters.contiguous(),
            bias_ptr=contiguous(bias),
            y_ptr=y,
            positions_ptr=contiguous(positions),
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("x", x, "bth"),
            REVERSED=reverse,
            **constants,
            **options,
        )
    return y


@custom_op("cat_lm::triton_multihead_conv")
def multihead_conv(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """y[b,t,i,:] = RoPE(bias[i,:] + sum_h sum_j F[j,i,h] x[b,t−j,h,:]).

    The rotated channels, a quarter of GPT-NeoX's, are turned where they lie, by a kernel more. In
    the first one they would be columns of a product of their own, of which there are too few.

    Args:
        x: [B, T, H, D].
        filters: [W, H, H] (lag, output head, input head), of x's dtype.
        bias: [H, D], of x's dtype.
        positions: int32 [B, T]; an input j steps back counts if j is at most the position.
        cos, sin: [B or 1, T, R], without a gradient; the first R channels are turned by halves.

    Returns:
        [B, T, H, D], contiguous.
    """
    y = _mix(x, filters, bias, positions, reverse=False)
    if cos is not None:
        turn(y, y, cos, sin)
    return y


@custom_op("cat_lm::triton_multihead_conv_dx")
def multihead_conv_dx(dy: Tensor, filters: Tensor, positions: Tensor | None) -> Tensor:
    """The gradient with respect to x, [B, T, H, D]."""
    return _mix(dy, filters.transpose(1, 2), None, positions, reverse=True)


@custom_op("cat_lm::triton_multihead_conv_df")
def multihead_conv_df(dy: Tensor, x: Tensor, window: int, positions: Tensor | None) -> Tensor:
    """The gradient with respect to the filters, [W, H, H], summed in fp32 in a fixed order."""
    batch, time, heads, width = x.shape
    constants, options = filter_options(x, window)
    steps, inner = constants["STEPS"], constants["INNER"]
    x, dy = unit_stride(x), unit_stride(dy)
    blocks = batch * cdiv(time, steps)
    blocks_per_program = cdiv(blocks, PARTS)
    parts = cdiv(blocks, blocks_per_program)
    programs = cdiv(heads, HEADS) ** 2 * cdiv(steps + window - 1, inner) * parts
    sums = x.new_empty(parts, steps, window, heads, heads, dtype=torch.float32)
    with on_device_of(x):
        mix_filters_kernel[(programs,)](
            dy_ptr=dy,
            x_ptr=x,
            df_ptr=sums,
            positions_ptr=contiguous(positions),
            blocks_per_program=blocks_per_program,
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("dy", dy, "bth"),
            **strides("x", x, "bth"),
            **constants,
            **options,
        )
    return sums.sum(dim=(0, 1)).to(x.dtype)


@multihead_conv.register_fake
def _(x, filters, bias, positions, cos, sin):
    return x.new_empty(x.shape)


@multihead_conv_dx.register_fake
def _(dy, filters, positions):
    return dy.new_empty(dy.shape)


@multihead_conv_df.register_fake
def _(dy, x, window, positions):
    return x.new_empty(window, x.shape[2], x.shape[2])


def _setup_context(ctx, inputs, output):
    x, filters, bias, *others = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, filters, *others)


def _backward(ctx, dy):
    x, filters, positions, cos, sin = ctx.saved_tensors
    dx = df = dbias = None
    if cos is not None:  # once, for three that read it
        dy = rotate(dy, cos, sin, True)
    if ctx.needs_input_grad[0]:
        dx = multihead_conv_dx(dy, filters, positions)
    if ctx.needs_input_grad[1]:
        df = multihead_conv_df(dy, x, filters.shape[0], positions)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        dbias = dy.sum(dim=(0, 1), dtype=torch.float32).to(dy.dtype)
    return dx, df, dbias, None, None, None


multihead_conv.register_autograd(_backward, setup_context=_setup_context)


@multihead_conv.register_vmap
def _(info, axes, *tensors):
    if tensors[4] is not None:
        return vmap_rules.in_turn(info.batch_size, axes, multihead_conv, tensors)

    def apply(*tensors):
        return multihead_conv(*tensors, None, None)

    return vmap_rules.forward(info.batch_size, axes[:4], apply, *tensors[:4], mixes_heads=True)


@multihead_conv_dx.register_vmap
def _(info, axes, *tensors):
    return vmap_rules.in_turn(info.batch_size, axes, multihead_conv_dx, tensors)


@multihead_conv_df.register_vmap
def _(info, axes, dy, x, window, positions):
    def apply(dy, x, positions):
        return multihead_conv_df(dy, x, window, positions)

    return vmap_rules.in_turn(info.batch_size, (*axes[:2], axes[3]), apply, (dy, x, positions))
