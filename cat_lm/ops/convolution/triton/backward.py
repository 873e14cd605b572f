"""Backward kernels of the convolution per head or channel: one tensor, or packed q, k and v.

One pass reads dy and x and writes dx. For an input at step i of a tile and an output at step k of
the tile and the HALO after it, which meet at lag k − i,

    dX = Mᵀ dY,   Mᵀ[i, k] = F[k − i],       dF[j] = sum over k − i = j of (X dYᵀ)[i, k].

The products X dYᵀ of a program's tiles are summed in registers and written once, each at its lag:
[programs, heads, BLOCK, W] numbers whose sum over programs and BLOCK, taken afterwards in a fixed
order, is dF. No atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.tiles import (
    add_product,
    load_rows,
    rotary_partners,
    taps_of_channels,
    taps_of_lags,
)


@triton.jit
def load_gradient(
    dy_ptr,
    dy_stride,
    cos_ptr,
    sin_ptr,
    angles,
    first,
    rows,
    length,
    columns,
    inside,
    ROTARY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The gradient of the convolution's outputs: that of the results, rotated back.

    dy_ptr points to the row of the batch; `angles` is where that row's begin in cos_ptr, sin_ptr.
    """
    gradient = load_rows(dy_ptr, first, rows, length, columns, inside, dy_stride)
    if ROTARY > 0:
        partners = rotary_partners(columns, ROTARY, ALIGNMENT)
        rotated = columns < ROTARY
        others = load_rows(dy_ptr, first, rows, length, partners, rotated, dy_stride)
        cosines = load_rows(cos_ptr + angles, first, rows, length, columns, rotated, ROTARY)
        sines = load_rows(sin_ptr + angles, first, rows, length, partners, rotated, ROTARY)
        others = others.to(tl.float32) * sines.to(tl.float32)
        others = tl.where(columns[None, :] < ROTARY // 2, others, -others)
        gradient = gradient.to(tl.float32)
        turned = gradient * cosines.to(tl.float32) + others
        gradient = tl.where(rotated[None, :], turned, gradient)
    return gradient


@triton.jit
def backward_dot_stream(
    dy_ptr,
    x_ptr,
    f_ptr,
    dx_ptr,
    df_ptr,
    dbias_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    segment,
    chunk,
    tiles_per_program,
    batch_size,
    length,
    width,
    dy_stride_b,
    dy_stride_t,
    x_stride_b,
    x_stride_t,
    dx_stride_b,
    dx_stride_t,
    cos_stride_b,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    HALO: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One head of one stream through matrix products.

    All pointers but the angles' and the positions' point to the head; df_ptr and dbias_ptr, to
    where this program leaves its sums, [BLOCK, W] and [D]. f_ptr and what is not asked for
    (dx_ptr, df_ptr, dbias_ptr) may be None.
    """
    rows = tl.arange(0, BLOCK)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    near_lags = rows[None, :] - rows[:, None]
    if f_ptr is not None:
        near = taps_of_lags(f_ptr, near_lags, WINDOW)
        if HALO > 0:
            halo = tl.arange(0, HALO)
            far_lags = BLOCK + halo[None, :] - rows[:, None]
            far = taps_of_lags(f_ptr, far_lags, WINDOW)
            far_sums = tl.zeros([BLOCK, HALO], dtype=tl.float32)
    near_sums = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    bias_sums = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)

    tiles_per_row = tl.cdiv(length, BLOCK)
    start = segment * tiles_per_program
    last = tl.minimum(start + tiles_per_program, batch_size * tiles_per_row)
    for tile in range(start, last):
        batch = (tile // tiles_per_row).to(tl.int64)
        first = (tile % tiles_per_row) * BLOCK
        source = dy_ptr + batch * dy_stride_b
        angles = batch * cos_stride_b
        dy = load_gradient(
            *(source, dy_stride_t, cos_ptr, sin_ptr, angles, first, rows, length),
            *(columns, inside, ROTARY, ALIGNMENT),
        )
        if dbias_ptr is not None:
            bias_sums += dy.to(tl.float32)
        if dx_ptr is not None:
            target = dx_ptr + batch * dx_stride_b + first.to(tl.int64) * dx_stride_t
            target = target + rows[:, None] * dx_stride_t + columns[None, :]
        stored = (first + rows < length)[:, None] & inside[None, :]
        if f_ptr is None:
            if dx_ptr is not None:
                tl.store(target, dy.to(dx_ptr.dtype.element_ty), mask=stored)
        else:
            dy = dy.to(x_ptr.dtype.element_ty)
            if positions_ptr is not None:
                reach_ptr = positions_ptr + batch * length + first
                reach = tl.load(reach_ptr + rows, mask=first + rows < length, other=0)
                near_allowed = near_lags <= reach[None, :]
            if HALO > 0:
                after = load_gradient(
                    *(source, dy_stride_t, cos_ptr, sin_ptr, angles, first + BLOCK, halo, length),
                    *(columns, inside, ROTARY, ALIGNMENT),
                ).to(x_ptr.dtype.element_ty)
                if positions_ptr is not None:
                    in_row = first + BLOCK + halo < length
                    reach = tl.load(reach_ptr + BLOCK + halo, mask=in_row, other=0)
                    far_allowed = far_lags <= reach[None, :]
            if dx_ptr is not None:
                matrix = near
                if positions_ptr is not None:
                    matrix = tl.where(near_allowed, near, 0.0)
                dx = add_product(tl.zeros([BLOCK, COLUMNS], dtype=tl.float32), matrix, dy)
                if HALO > 0:
                    matrix = far
                    if positions_ptr is not None:
                        matrix = tl.where(far_allowed, far, 0.0)
                    dx = add_product(dx, matrix, after)
                tl.store(target, dx.to(dx_ptr.dtype.element_ty), mask=stored)
            if df_ptr is not None:
                inputs = load_rows(
                    x_ptr + batch * x_stride_b, first, rows, length, columns, inside, x_stride_t
                )
                if positions_ptr is not None:
                    product = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
                    product = add_product(product, inputs, tl.trans(dy))
                    near_sums += tl.where(near_allowed, product, 0.0)
                else:
                    near_sums = add_product(near_sums, inputs, tl.trans(dy))
                if HALO > 0:
                    if positions_ptr is not None:
                        product = tl.zeros([BLOCK, HALO], dtype=tl.float32)
                        product = add_product(product, inputs, tl.trans(after))
                        far_sums += tl.where(far_allowed, product, 0.0)
                    else:
                        far_sums = add_product(far_sums, inputs, tl.trans(after))

    if dbias_ptr is not None:
        tl.store(dbias_ptr + columns, tl.sum(bias_sums, axis=0), mask=inside)
    if f_ptr is not None and df_ptr is not None:
        # Every (step, lag) is met exactly once, in `near_sums` or in `far_sums`.
        df_rows = df_ptr + rows[:, None] * WINDOW
        in_window = (near_lags >= 0) & (near_lags < WINDOW)
        tl.store(df_rows + near_lags, near_sums, mask=in_window)
        if HALO > 0:
            tl.store(df_rows + far_lags, far_sums, mask=far_lags < WINDOW)


@triton.jit
def backward_shift_stream(
    dy_ptr,
    x_ptr,
    f_ptr,
    dx_ptr,
    df_ptr,
    dbias_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    tile,
    chunk,
    length,
    width,
    dy_stride_b,
    dy_stride_t,
    x_stride_b,
    x_stride_t,
    dx_stride_b,
    dx_stride_t,
    cos_stride_b,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    """One tile of one head of one stream, lag by lag, in fp32.

    As `backward_dot_stream`, but df_ptr points to [W] numbers, or [W, D] for filters per channel.
    """
    rows = tl.arange(0, BLOCK)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    tiles_per_row = tl.cdiv(length, BLOCK)
    batch = (tile // tiles_per_row).to(tl.int64)
    first = (tile % tiles_per_row) * BLOCK
    dy_ptr += batch * dy_stride_b
    angles = batch * cos_stride_b
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
        tl.store(dbias_ptr + columns, tl.sum(dy.to(tl.float32), axis=0), mask=inside)


@triton.jit
def backward_stream(
    dy_ptr,
    x_ptr,
    f_ptr,
    dx_ptr,
    df_ptr,
    dbias_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    segment,
    chunk,
    tiles_per_program,
    batch_size,
    length,
    width,
    dy_stride_b,
    dy_stride_t,
    x_stride_b,
    x_stride_t,
    dx_stride_b,
    dx_stride_t,
    cos_stride_b,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    HALO: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    USE_DOT: tl.constexpr,
):
    """One head of one stream, in the way that USE_DOT says."""
    if USE_DOT:
        backward_dot_stream(
            *(dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, tiles_per_program, batch_size, length, width),
            *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
            *(cos_stride_b, WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT),
        )
    else:
        backward_shift_stream(
            *(dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, length, width),
            *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
            *(cos_stride_b, WINDOW, BLOCK, COLUMNS, ROTARY, ALIGNMENT, PER_CHANNEL),
        )


@triton.jit
def backward_kernel(
    dy_ptr,
    x_ptr,
    f_ptr,
    dx_ptr,
    df_ptr,
    dbias_ptr,
    positions_ptr,
    tiles_per_program,
    batch_size,
    length,
    heads,
    width,
    dy_stride_b,
    dy_stride_t,
    dy_stride_h,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    HALO: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    USE_DOT: tl.constexpr,
):
    """Gradients of `forward_kernel`: dx [B, H, T, D] and each program's sums for df and dbias.

    df_ptr is [segments, chunks, H, BLOCK, W] with matrix products, [segments, chunks, H, W] without
    and [segments, H, W, D] for filters per channel; dbias_ptr is [segments, H, D].
    """
    program = tl.program_id(0)
    chunks = tl.cdiv(width, COLUMNS)
    chunk = program % chunks
    head = (program // chunks % heads).to(tl.int64)
    segment = program // chunks // heads
    if dx_ptr is not None:
        dx_ptr += head * length * width
    if df_ptr is not None:
        if PER_CHANNEL:
            df_ptr += (segment * heads + head) * WINDOW * width
        else:
            SUMS: tl.constexpr = BLOCK * WINDOW if USE_DOT else WINDOW
            df_ptr += ((segment * chunks + chunk) * heads + head) * SUMS
    if dbias_ptr is not None:
        dbias_ptr += (segment * heads + head) * width
    backward_stream(
        dy_ptr + head * dy_stride_h,
        x_ptr + head * x_stride_h,
        f_ptr + head * (WINDOW * width if PER_CHANNEL else WINDOW),
        *(dx_ptr, df_ptr, dbias_ptr, None, None, positions_ptr),
        *(segment, chunk, tiles_per_program, batch_size, length, width),
        *(dy_stride_b, dy_stride_t, x_stride_b, x_stride_t),
        *(heads.to(tl.int64) * length * width, width, 0),
        *(WINDOW, BLOCK, HALO, COLUMNS, 0, 1, PER_CHANNEL, USE_DOT),
    )
