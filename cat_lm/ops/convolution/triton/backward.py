"""Backward kernels of the convolution per head or channel: one tensor, or packed q, k and v.

`backward_dot.py` has what matrix products compute. Here is the sum over lags as it is defined, and
the kernels. Sums over programs are taken afterwards, in a fixed order; there are no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.backward_dot import backward_dot_stream, load_gradient
from cat_lm.ops.convolution.triton.tiles import (
    VARYING,
    load_rows,
    rotated_columns,
    rotates_apart,
    taps_of_channels,
)


@triton.jit
def backward_shift_stream(
    dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr,
    tile, chunk, chunks, length, width,
    dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ROTARY: tl.constexpr,
    ALIGNMENT: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One tile of one head of one stream, lag by lag, in fp32.

    As `backward_dot_stream`, but df_ptr is [programs, W], or [programs / chunks, W, D] for filters
    per channel.
    """
    rows = tl.arange(0, BLOCK)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    tiles_per_row = tl.cdiv(length, BLOCK)
    batch = (tile // tiles_per_row).to(tl.int64)
    first = (tile % tiles_per_row) * BLOCK
    dy_ptr += batch * dy_stride_b
    angles = batch * cos_stride_b
    program = tl.program_id(0).to(tl.int64)
    if df_ptr is not None:
        df_ptr += program // chunks * (WINDOW * width) if PER_CHANNEL else program * WINDOW
    lags = 1
    if f_ptr is not None:
        lags = WINDOW
        inputs = load_rows(
            x_ptr + batch * x_stride_b, first, rows, length, columns, inside, x_stride_t
        ).to(tl.float32)
    dx = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
    for lag in range(lags):
        dy = load_gradient(
            *(dy_ptr, dy_stride_t, cos_ptr, sin_ptr, angles, first + lag, rows, length),
            *(columns, inside, ROTARY, ALIGNMENT),
        ).to(tl.float32)
        if f_ptr is None:
            dx = dy
        else:
            if positions_ptr is not None:
                times = first + lag + rows
                reach_ptr = positions_ptr + batch * length + times
                reach = tl.load(reach_ptr, mask=times < length, other=0)
                dy = tl.where((lag <= reach)[:, None], dy, 0.0)
            dx += dy * taps_of_channels(f_ptr, lag, width, columns, inside, PER_CHANNEL)
            if df_ptr is not None:
                product = dy * inputs
                if PER_CHANNEL:
                    sums = tl.sum(product, axis=0)
                    tl.store(df_ptr + lag * width + columns, sums, mask=inside)
                else:
                    tl.store(df_ptr + lag, tl.sum(product))
    if dx_ptr is not None:
        target = dx_ptr + batch * dx_stride_b + first.to(tl.int64) * dx_stride_t
        tl.store(
            target + rows[:, None] * dx_stride_t + columns[None, :],
            dx.to(dx_ptr.dtype.element_ty),
            mask=(first + rows < length)[:, None] & inside[None, :],
        )
    if dbias_ptr is not None:
        dy = load_gradient(
            *(dy_ptr, dy_stride_t, cos_ptr, sin_ptr, angles, first, rows, length),
            *(columns, inside, ROTARY, ALIGNMENT),
        )
        dbias_ptr += program // chunks * width
        tl.store(dbias_ptr + columns, tl.sum(dy.to(tl.float32), axis=0), mask=inside)


@triton.jit
def backward_stream(
    dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr,
    segment, chunk, chunks, tiles_per_program, batch_size, length, width,
    dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr, PER_CHANNEL: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """One head of one stream, in the way that USE_DOT says."""
    if USE_DOT:
        APART: tl.constexpr = rotates_apart(ROTARY, COLUMNS)
        if APART:
            if chunk == 0:
                backward_dot_stream(
                    *(dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr),
                    *(cos_ptr, sin_ptr, positions_ptr),
                    *(segment, chunk, chunks, tiles_per_program, batch_size, length, width),
                    *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
                    *(cos_stride_b, WINDOW, BLOCK, HALO),
                    *(rotated_columns(ROTARY, COLUMNS), 0, ROTARY, ROTARY, ALIGNMENT),
                )
            else:
                backward_dot_stream(
                    *(dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr),
                    *(None, None, positions_ptr),
                    *(segment, chunk - 1, chunks, tiles_per_program, batch_size, length, width),
                    *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
                    *(0, WINDOW, BLOCK, HALO, COLUMNS, ROTARY, None, 0, 1),
                )
        else:
            backward_dot_stream(
                *(dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr),
                *(cos_ptr, sin_ptr, positions_ptr),
                *(segment, chunk, chunks, tiles_per_program, batch_size, length, width),
                *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
                *(cos_stride_b, WINDOW, BLOCK, HALO, COLUMNS, 0, None, ROTARY, ALIGNMENT),
            )
    else:
        backward_shift_stream(
            *(dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, chunks, length, width),
            *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
            *(cos_stride_b, WINDOW, BLOCK, COLUMNS, ROTARY, ALIGNMENT, PER_CHANNEL),
        )


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr,
    tiles_per_program, batch_size, length, heads, width,
    dy_stride_b, dy_stride_t, dy_stride_h, x_stride_b, x_stride_t, x_stride_h, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr, PER_CHANNEL: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of `forward_kernel`: dx [B, T, H, D] and each program's sums for df and dbias.

    df_ptr is [segments, H, chunks, BLOCK, W] with matrix products, [segments, H, chunks, W] without
    and [segments, H, W, D] for filters per channel; dbias_ptr is [segments, H, D]. There is a chunk
    more where rotated columns are one of their own, the first.
    """
    program = tl.program_id(0)
    APART: tl.constexpr = 1 if USE_DOT and rotates_apart(ROTARY, COLUMNS) else 0
    chunks = tl.cdiv(width, COLUMNS) + APART
    chunk = program % chunks
    head = (program // chunks % heads).to(tl.int64)
    segment = program // chunks // heads
    if dx_ptr is not None:
        dx_ptr += head * width
    backward_stream(
        dy_ptr + head * dy_stride_h,
        x_ptr + head * x_stride_h,
        f_ptr + head * (WINDOW * width if PER_CHANNEL else WINDOW),
        *(dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr),
        *(segment, chunk, chunks, tiles_per_program, batch_size, length, width),
        *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t),
        *(tl.cast(heads, tl.int64) * width * length, heads * width, cos_stride_b),
        *(WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT, PER_CHANNEL, USE_DOT),
    )
