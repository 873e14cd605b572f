"""Rotary positions alone: cat_lm::triton_rotate, where no other kernel can turn what it writes.

A thread has both channels of a pair, so that a tensor may also be turned where it lies: then its
rotated channels alone are read and written.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.convolution.triton.launch import angle_arguments, rotated
from cat_lm.ops.convolution.triton.tiles import VARYING
from cat_lm.ops.runtime.operators import custom_op, register_in_turn
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    next_power_of_2,
    on_device_of,
    unit_stride,
)

ELEMENTS = 2048  # pairs per program: 16 for each thread of 4 warps


class RotationConstants(NamedTuple):
    """The compile-time constants of the kernel.

    Attributes:
        rotary: number of channels that are turned, `half` of them and their partners, or turned
            `back`.
        rows: number of a program's rows, of the T·H rows of a sequence.
        passed: columns that are copied as they are, at a time; 0 for y that is x.
    """

    rotary: int
    rows: int
    half: int
    passed: int
    back: bool


@triton.jit(do_not_specialize=VARYING)
def rotate_kernel(x, y, angles, length, shape, TURN: tl.constexpr):
    """y [B, T, H, D] is x, of which the first channels are turned.

    Args:
        x, y: a pointer each, and the strides of rows, steps and heads.
        shape: heads, width.
    """
    x_ptr, x_stride_b, x_stride_t, x_stride_h = x
    y_ptr, y_stride_b, y_stride_t, y_stride_h = y
    cos_ptr, sin_ptr, cos_stride_b = angles
    heads, width = shape
    ROTARY: tl.constexpr = TURN.rotary
    blocks = tl.cdiv(length * heads, TURN.rows)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    rows = tl.program_id(0) % blocks * TURN.rows + tl.arange(0, TURN.rows)
    times = (rows // heads).to(tl.int64)
    present = times < length
    x_rows = (x_ptr + batch * x_stride_b + times * x_stride_t + rows % heads * x_stride_h)[:, None]
    y_rows = (y_ptr + batch * y_stride_b + times * y_stride_t + rows % heads * y_stride_h)[:, None]
    place = (batch * cos_stride_b + times * ROTARY)[:, None]
    first = tl.arange(0, TURN.half)[None, :]
    mask = present[:, None] & (first < ROTARY // 2)
    second = first + ROTARY // 2
    a = tl.load(x_rows + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_rows + second, mask=mask, other=0.0).to(tl.float32)
    a_cosines = tl.load(cos_ptr + place + first, mask=mask, other=0.0).to(tl.float32)
    b_cosines = tl.load(cos_ptr + place + second, mask=mask, other=0.0).to(tl.float32)
    a_sines = tl.load(sin_ptr + place + first, mask=mask, other=0.0).to(tl.float32)
    b_sines = tl.load(sin_ptr + place + second, mask=mask, other=0.0).to(tl.float32)
    if TURN.back:
        turned = a * a_cosines + b * b_sines
        other = b * b_cosines - a * a_sines
    else:
        turned = a * a_cosines - b * a_sines
        other = b * b_cosines + a * b_sines
    tl.store(y_rows + first, turned.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_rows + second, other.to(y_ptr.dtype.element_ty), mask=mask)
    if TURN.passed > 0:
        for begin in range(0, width - ROTARY, TURN.passed):
            columns = ROTARY + begin + tl.arange(0, TURN.passed)[None, :]
            passed = present[:, None] & (columns < width)
            tl.store(y_rows + columns, tl.load(x_rows + columns, mask=passed), mask=passed)


def rotate_into(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> None:
    """Fill y with the rotated x [B, T, H, D]; they may be the same."""
    if cos.shape[-1] == 0:
        if x is not y:
            y.copy_(x)
        return
    batch, time, heads, width = x.shape
    rotary, half = rotated(cos), next_power_of_2(rotated(cos) // 2)
    passed = 0 if x is y or width == rotary else min(64, 2 * half)
    compiled = RotationConstants(rotary, max(1, ELEMENTS // half), half, passed, back)
    if x is y:  # The kernel writes only these channels; count no more as changed.
        x = y = y[..., :rotary]
    with on_device_of(x):
        rotate_kernel[(batch * cdiv(time * heads, compiled.rows),)](
            x=(x, *x.stride()[:3]),
            y=(y, *y.stride()[:3]),
            angles=angle_arguments(cos, sin),
            length=time,
            shape=(heads, width),
            TURN=compiled,
            num_warps=4,
        )


@custom_op("cat_lm::triton_rotate")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Turn the first R channels of x [B, T, H, D] by the angles, [B or 1, T, R], or back.

    Returns:
        [B, T, H, D] in x's dtype, contiguous.
    """
    x, y = unit_stride(x), x.new_empty(x.shape)
    rotate_into(x, y, cos, sin, back)
    return y


@rotate.register_fake
def _(x, cos, sin, back):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dy):
    return rotate(dy, *ctx.saved_tensors, not ctx.back), None, None, None


rotate.register_autograd(_backward, setup_context=_setup_context)


register_in_turn(rotate)
