"""The operator that torch knows, for autograd and torch.compile, and the choice inside of it."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.cpu import multihead, shifts, toeplitz
from cat_lm.ops.convolution.cpu.kernel import load_kernel
from cat_lm.ops.runtime import vmap_rules
from cat_lm.ops.runtime.operators import custom_op

# What computes each kind of convolution in plain torch.
TORCH_PATHS: dict[str, ModuleType] = {
    "head": toeplitz,
    "depthwise": shifts,
    "multihead": multihead,
}


@custom_op("cat_lm::cpu_conv", device_types="cpu")
def cpu_conv(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """y [B, T, H, D] of one of the convolutions; see `cat_lm.ops.convolution.cpu.convolve`."""
    kernel = load_kernel()
    out = _output(conv_type, x)
    if kernel is not None:
        kernel.forward(conv_type, x, filters, bias, positions, out)
        return out
    return out.copy_(TORCH_PATHS[conv_type].forward(x, filters, bias, positions))


@custom_op("cat_lm::cpu_conv_backward", device_types="cpu")
def cpu_conv_backward(
    conv_type: str,
    dy: Tensor,
    x: Tensor,
    filters: Tensor,
    positions: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, filters and bias; empty tensors for those that are not wanted."""
    dx, df, db = _gradients(x, filters, wanted)
    kernel = load_kernel()
    if kernel is not None:
        chosen = (
            tensor if want else None for tensor, want in zip((dx, df, db), wanted, strict=True)
        )
        kernel.backward(conv_type, dy, x, filters, positions, *chosen)
        return dx, df, db
    path = TORCH_PATHS[conv_type]
    window = kinds.get(conv_type).window_of(filters)
    if wanted[0]:
        dx.copy_(path.input_gradient(dy, filters, positions))
    if wanted[1]:
        df.copy_(path.filter_gradient(dy, x, window, positions))
    if wanted[2]:
        sums = torch.promote_types(x.dtype, torch.float32)
        db.copy_(dy.sum(dim=(0, 1), dtype=sums))
    return dx, df, db


def _output(conv_type: str, x: Tensor) -> Tensor:
    """Room for y: [B, H, T, D] in memory, which attention reads, where heads stay apart."""
    if kinds.get(conv_type).mixes_heads:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _gradients(x: Tensor, filters: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients; that of x as the projection's backward reads it, [B, T, H, D]."""
    shapes = (x.shape, filters.shape, x.shape[2:])
    dx, df, db = (
        x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted, strict=True)
    )
    return dx, df, db


@cpu_conv.register_fake
def _(conv_type, x, filters, bias, positions):
    return _output(conv_type, x)


@cpu_conv_backward.register_fake
def _(conv_type, dy, x, filters, positions, wanted):
    return _gradients(x, filters, wanted)


def _setup_context(ctx, inputs, output):
    ctx.conv_type, x, filters, _, positions = inputs
    ctx.save_for_backward(x, filters, positions)


def _backward(ctx, dy):
    wanted = list(ctx.needs_input_grad[1:4])
    if not any(wanted):
        return (None,) * 5
    x, filters, positions = ctx.saved_tensors
    gradients = cpu_conv_backward(ctx.conv_type, dy, x, filters, positions, wanted)
    chosen = (tensor if want else None for tensor, want in zip(gradients, wanted, strict=True))
    return (None, *chosen, None)


cpu_conv.register_autograd(_backward, setup_context=_setup_context)


@cpu_conv.register_vmap
def _(info, axes, conv_type, *tensors):
    def apply(*tensors):
        return cpu_conv(conv_type, *tensors)

    mixes = kinds.get(conv_type).mixes_heads
    return vmap_rules.forward(info.batch_size, axes[1:], apply, *tensors, mixes_heads=mixes)


@cpu_conv_backward.register_vmap
def _(info, axes, conv_type, dy, x, filters, positions, wanted):
    def apply(*tensors):
        return cpu_conv_backward(conv_type, *tensors, wanted)

    tensors, mixes = (dy, x, filters, positions), kinds.get(conv_type).mixes_heads
    return vmap_rules.backward(info.batch_size, axes[1:5], apply, *tensors, mixes_heads=mixes)
