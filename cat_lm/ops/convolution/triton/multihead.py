"""The multi-head convolution by Triton kernels: products with block Toeplitz matrices.

A block of STEPS outputs of all heads is one matrix times the STEPS + W − 1 inputs that it can see,

    Y[(c, i), d] = sum over (k, h) of M[(c, i), (k, h)] X[(k, h), d],   M = F[c + W−1 − k, i, h],

for steps c and k and heads i and h. M is the same for all blocks, and its entries are read from the
filter, which the caches hold. The gradient of x is the same with F transposed in its heads and time
reversed, and dF sums dY Xᵀ over blocks and then over (c, k) of one lag.

Heads are taken HEADS = 16 at a time, the least that matrix units take; fewer are filled up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.convolution.kinds.operators import empty_gradients
from cat_lm.ops.convolution.triton import launch
from cat_lm.ops.convolution.triton.rotation import rotate, rotate_into
from cat_lm.ops.convolution.triton.tiles import VARYING, add_product
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    next_power_of_2,
    on_device_of,
    unit_stride,
)

# The least heads that matrix units take.
HEADS = tl.constexpr(16)
# Programs that share the sum over blocks in dF; each leaves STEPS · W · H² numbers.
PARTS = 64


class MixingConstants(NamedTuple):
    """The compile-time constants of a kernel.

    Attributes:
        window: W.
        steps: outputs of a block.
        inner: inputs that a product sums over at a time, of HEADS heads each.
        columns: channels of a tile.
        blocks: blocks that go into one product.
    """

    window: int
    steps: int
    inner: int
    columns: int
    blocks: int = 1


@triton.jit(do_not_specialize=VARYING)
def mix_kernel(
    x,
    f_ptr,
    bias_ptr,
    y_ptr,
    positions_ptr,
    batch_size,
    length,
    shape,
    MIX: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """y [B, T, H, D] for x [B, T, H, D], BLOCKS blocks of STEPS outputs of HEADS heads at a time.

    Args:
        x: a pointer, and the strides of rows, steps and heads. With REVERSED these are gradients,
            and each output looks ahead; f_ptr [W, H, H] is then transposed.
        positions_ptr: None, or BLOCKS must be 1: M then differs by block.
        shape: heads, width.
    """
    x_ptr, x_stride_b, x_stride_t, x_stride_h = x
    heads, width = shape
    WINDOW: tl.constexpr = MIX.window
    STEPS: tl.constexpr = MIX.steps
    INNER: tl.constexpr = MIX.inner
    COLUMNS: tl.constexpr = MIX.columns
    BLOCKS: tl.constexpr = MIX.blocks
    program = tl.program_id(0)
    head_groups = tl.cdiv(heads, HEADS.value)
    chunks = tl.cdiv(width, COLUMNS)
    first_head = program % head_groups * HEADS
    chunk = program // head_groups % chunks
    group = program // head_groups // chunks
    blocks_per_row = tl.cdiv(length, STEPS)

    rows = tl.arange(0, STEPS * HEADS)
    steps, outputs = rows // HEADS, first_head + rows % HEADS
    places = tl.arange(0, BLOCKS * COLUMNS)
    blocks = group * BLOCKS + places // COLUMNS
    columns = chunk * COLUMNS + places % COLUMNS
    batches = (blocks // blocks_per_row).to(tl.int64)
    firsts = blocks % blocks_per_row * STEPS
    valid = (columns < width) & (batches < batch_size)
    # Where an output's window begins, relative to the block's first step.
    earliest = 0 if REVERSED else 1 - WINDOW
    sources = x_ptr + batches * x_stride_b + firsts.to(tl.int64) * x_stride_t + columns

    if positions_ptr is not None:
        block_first = group % blocks_per_row * STEPS
        reach_ptr = positions_ptr + (group // blocks_per_row).to(tl.int64) * length + block_first
        reach = tl.load(reach_ptr + steps, mask=block_first + steps < length, other=0)

    sums = tl.zeros([STEPS * HEADS, BLOCKS * COLUMNS], dtype=tl.float32)
    inner = tl.arange(0, INNER * HEADS)
    inner_groups = tl.cdiv(STEPS + WINDOW - 1, INNER)
    for index in range(0, inner_groups * head_groups):
        offsets = earliest + index // head_groups * INNER + inner // HEADS
        inputs = index % head_groups * HEADS + inner % HEADS
        lags = steps[:, None] - offsets[None, :]
        if REVERSED:
            lags = -lags
        used = (
            (lags >= 0) & (lags < WINDOW) & (outputs < heads)[:, None] & (inputs < heads)[None, :]
        )
        if positions_ptr is not None:
            if REVERSED:
                in_row = block_first + offsets < length
                ahead = tl.load(reach_ptr + offsets, mask=in_row, other=0)
                used = used & (lags <= ahead[None, :])
            else:
                used = used & (lags <= reach[:, None])
        entries = (lags * heads + outputs[:, None]) * heads + inputs[None, :]
        matrix = tl.load(f_ptr + entries, mask=used, other=0.0)
        times = firsts[None, :] + offsets[:, None]
        present = (times >= 0) & (times < length) & (inputs < heads)[:, None] & valid[None, :]
        local = offsets * x_stride_t + inputs * x_stride_h
        values = tl.load(sources[None, :] + local[:, None], mask=present, other=0.0)
        sums = add_product(sums, matrix, values)

    stored = (firsts[None, :] + steps[:, None] < length) & (outputs < heads)[:, None]
    stored = stored & valid[None, :]
    if bias_ptr is not None:
        entries = outputs[:, None] * width + columns[None, :]
        used = (outputs < heads)[:, None] & valid[None, :]
        sums += tl.load(bias_ptr + entries, mask=used, other=0.0).to(tl.float32)
    row_places = (steps * heads + outputs) * width
    targets = y_ptr + (batches * length + firsts) * heads * width + columns
    tl.store(targets[None, :] + row_places[:, None], sums.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=VARYING)
def mix_filters_kernel(
    dy,
    x,
    df_ptr,
    positions_ptr,
    blocks_per_program,
    batch_size,
    length,
    shape,
    MIX: tl.constexpr,
):
    """A program's part of dF, df_ptr [programs, STEPS, W, H, H], to be summed over the first two.

    dY Xᵀ of STEPS outputs with INNER of the inputs they see, for HEADS by HEADS heads, summed over
    `blocks_per_program` blocks and all channels.
    """
    dy_ptr, dy_stride_b, dy_stride_t, dy_stride_h = dy
    x_ptr, x_stride_b, x_stride_t, x_stride_h = x
    heads, width = shape
    WINDOW: tl.constexpr = MIX.window
    STEPS: tl.constexpr = MIX.steps
    INNER: tl.constexpr = MIX.inner
    COLUMNS: tl.constexpr = MIX.columns
    program = tl.program_id(0)
    head_groups = tl.cdiv(heads, HEADS.value)
    inner_groups: tl.constexpr = (STEPS + WINDOW - 1 + INNER - 1) // INNER
    first_output = program % head_groups * HEADS
    first_input = program // head_groups % head_groups * HEADS
    program = program // head_groups // head_groups
    inner_group = program % inner_groups
    segment = program // inner_groups

    rows = tl.arange(0, STEPS * HEADS)
    steps, outputs = rows // HEADS, first_output + rows % HEADS
    inner = tl.arange(0, INNER * HEADS)
    offsets = 1 - WINDOW + inner_group * INNER + inner // HEADS
    inputs = first_input + inner % HEADS
    lags = steps[:, None] - offsets[None, :]

    chunks = tl.cdiv(width, COLUMNS)
    blocks_per_row = tl.cdiv(length, STEPS)
    sums = tl.zeros([STEPS * HEADS, INNER * HEADS], dtype=tl.float32)
    first_block = segment * blocks_per_program
    last_block = tl.minimum(first_block + blocks_per_program, batch_size * blocks_per_row)
    for index in range(first_block * chunks, last_block * chunks):
        block = index // chunks
        columns = index % chunks * COLUMNS + tl.arange(0, COLUMNS)
        batch = (block // blocks_per_row).to(tl.int64)
        first = block % blocks_per_row * STEPS
        inside = (columns < width)[None, :]
        present = ((first + steps < length) & (outputs < heads))[:, None] & inside
        source = dy_ptr + batch * dy_stride_b + first.to(tl.int64) * dy_stride_t
        local = steps * dy_stride_t + outputs * dy_stride_h
        gradient = tl.load(source + local[:, None] + columns[None, :], mask=present, other=0.0)
        times = first + offsets
        present = ((times >= 0) & (times < length) & (inputs < heads))[:, None] & inside
        source = x_ptr + batch * x_stride_b + first.to(tl.int64) * x_stride_t
        local = offsets * x_stride_t + inputs * x_stride_h
        values = tl.load(source + local[:, None] + columns[None, :], mask=present, other=0.0)
        gradient = gradient.to(x_ptr.dtype.element_ty)
        if positions_ptr is not None:
            reach_ptr = positions_ptr + batch * length + first + steps
            reach = tl.load(reach_ptr, mask=first + steps < length, other=0)
            product = tl.zeros([STEPS * HEADS, INNER * HEADS], dtype=tl.float32)
            product = add_product(product, gradient, tl.trans(values))
            sums += tl.where(lags <= reach[:, None], product, 0.0)
        else:
            sums = add_product(sums, gradient, tl.trans(values))

    used = (lags >= 0) & (lags < WINDOW) & (outputs < heads)[:, None] & (inputs < heads)[None, :]
    part = segment.to(tl.int64) * STEPS + steps
    places = ((part[:, None] * WINDOW + lags) * heads + outputs[:, None]) * heads + inputs[None, :]
    tl.store(df_ptr + places, sums, mask=used)


def _options(x: Tensor, mix: MixingConstants) -> dict[str, Any]:
    """Return the compile-time arguments and compiler options of a kernel."""
    stages = 1
    if x.dtype != torch.float32:
        # Three stages of the products' tiles take up to 96 KiB, more than AMD's GPUs have.
        stages = 3 if launch.shared_memory(x.device) >= 98304 else 2
    return {"MIX": mix, "num_warps": 8, "num_stages": stages}


def _mix(
    x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None, reverse: bool
) -> Tensor:
    """Return y = M x + bias, or with `reverse` and filters transposed in their heads, Mᵀ x."""
    batch, time, heads, width = x.shape
    # 128 rows by 256 columns are a tile of a fast matrix product; with documents the matrix differs
    # by block, so that no two blocks go into one product. fp32 has no matrix units and small tiles.
    half = x.dtype != torch.float32
    columns = min(128 if half else 64, max(16, next_power_of_2(width)))
    joined = max(1, 256 // columns) if half and positions is None else 1
    mix = MixingConstants(filters.shape[0], 8, 4 if half else 2, columns, joined)
    x, y = unit_stride(x), x.new_empty(x.shape)
    blocks = batch * cdiv(time, mix.steps)
    programs = cdiv(heads, HEADS.value) * cdiv(width, mix.columns)
    programs *= cdiv(blocks, mix.blocks)
    with on_device_of(x):
        mix_kernel[(programs,)](
            x=(x, *x.stride()[:3]),
            f_ptr=filters.contiguous(),
            bias_ptr=contiguous(bias),
            y_ptr=y,
            positions_ptr=contiguous(positions),
            batch_size=batch,
            length=time,
            shape=(heads, width),
            REVERSED=reverse,
            **_options(x, mix),
        )
    return y


def forward(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Compute y[b,t,i,:] = RoPE(bias[i,:] + sum_h sum_j F[j,i,h] x[b,t−j,h,:]), contiguous.

    The rotated channels, a quarter of GPT-NeoX's, are turned where they lie, by a kernel more. In
    the first one they would be columns of a product of their own, of which there are too few.
    """
    y = _mix(x, filters, bias, positions, reverse=False)
    if cos is not None:
        rotate_into(y, y, cos, sin)
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
    dx, df, dbias = empty_gradients(x, filters, wanted)
    if cos is not None:  # Compute the rotation once, since three products read it.
        dy = rotate(dy, cos, sin, True)
    if wanted[0]:
        dx = _mix(dy, filters.transpose(1, 2), None, positions, reverse=True)
    if wanted[1]:
        df = _filter_gradient(dy, x, filters.shape[0], positions)
    if wanted[2]:
        dbias = dy.sum(dim=(0, 1), dtype=torch.float32).to(dy.dtype)
    return dx, df, dbias


def _filter_gradient(dy: Tensor, x: Tensor, window: int, positions: Tensor | None) -> Tensor:
    """Return the gradient of the filters, [W, H, H], summed in fp32 in a fixed order."""
    batch, time, heads, width = x.shape
    half = x.dtype != torch.float32
    mix = MixingConstants(window, 8, 8 if half else 4, 64 if half else 16)
    x, dy = unit_stride(x), unit_stride(dy)
    blocks = batch * cdiv(time, mix.steps)
    blocks_per_program = cdiv(blocks, PARTS)
    parts = cdiv(blocks, blocks_per_program)
    programs = cdiv(heads, HEADS.value) ** 2 * cdiv(mix.steps + window - 1, mix.inner) * parts
    sums = x.new_empty(parts, mix.steps, window, heads, heads, dtype=torch.float32)
    with on_device_of(x):
        mix_filters_kernel[(programs,)](
            dy=(dy, *dy.stride()[:3]),
            x=(x, *x.stride()[:3]),
            df_ptr=sums,
            positions_ptr=contiguous(positions),
            blocks_per_program=blocks_per_program,
            batch_size=batch,
            length=time,
            shape=(heads, width),
            **_options(x, mix),
        )
    return sums.sum(dim=(0, 1)).to(x.dtype)
