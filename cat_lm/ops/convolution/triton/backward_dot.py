"""Backward kernels through matrix products: one head of one stream of a program.

For an input at step i of a tile and an output at step k of the tile and the HALO after it, which
meet at lag k − i,

    dX = Mᵀ dY,   Mᵀ[i, k] = F[k − i],       dF[j] = sum over k − i = j of (X dYᵀ)[i, k].

The products X dYᵀ of a program's tiles are summed in registers and written once, each at its lag:
[programs, heads, BLOCK, W] numbers whose sum over programs and BLOCK is dF.

Columns do not mix in dX and are summed in X dYᵀ. So programs of their own have the rotated ones
(`rotated_columns`), each of whose gradients is made of two: others need no registers for angles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.tiles import (
    add_apart,
    add_product,
    load_rows,
    rotary_partners,
    store_rows,
    taps_of_lags,
)


@triton.jit
def load_gradient(
    dy_ptr,
    dy_stride,
    cos_ptr, sin_ptr,
    angles, first, rows, length, columns, inside,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The gradient of the convolution's outputs: that of the results, rotated back.

    dy_ptr points to the row of the batch; `angles` is where that row's begin in cos_ptr, sin_ptr.
    """
    gradient = load_rows(dy_ptr, first, rows, length, columns, inside, dy_stride)
    if ROTARY > 0:
        partners = rotary_partners(columns, ROTARY, ALIGNMENT)
        rotated = inside & (columns < ROTARY)
        others = load_rows(dy_ptr, first, rows, length, partners, rotated, dy_stride)
        cosines = load_rows(cos_ptr + angles, first, rows, length, columns, rotated, ROTARY)
        sines = load_rows(sin_ptr + angles, first, rows, length, partners, rotated, ROTARY)
        others = others.to(tl.float32) * sines.to(tl.float32)
        others = tl.where(columns[None, :] < ROTARY // 2, others, -others)
        gradient = gradient.to(tl.float32)
        turned = gradient * cosines.to(tl.float32) + others
        gradient = tl.where(rotated[None, :], turned, gradient)
    return gradient


@triton.constexpr_function
def in_two_loops(halo):
    """Whether products with a halo are summed in a loop of their own: they fill the registers."""
    return halo > 64


@triton.jit
def earliest_of_halo(reach_ptr, first, length, BLOCK: tl.constexpr, HALO: tl.constexpr):
    """The first step of the tile that each of the HALO outputs after it may read."""
    steps = BLOCK + tl.arange(0, HALO)
    return steps - tl.load(reach_ptr + steps, mask=first + steps < length, other=0)


@triton.jit
def within_documents(numbers, earliest, DOCUMENTS: tl.constexpr):
    """Numbers [BLOCK, K], zero where output k does not read input i, but from earliest[k] on."""
    if DOCUMENTS:
        rows = tl.arange(0, numbers.shape[0])
        numbers = tl.where(rows[:, None] >= earliest[None, :], numbers, 0.0)
    return numbers


@triton.jit
def add_products(sums, inputs, gradient, earliest, DOCUMENTS: tl.constexpr):
    """sums + X dYᵀ [BLOCK, K], within documents."""
    if DOCUMENTS:
        product = tl.zeros(sums.shape, dtype=tl.float32)
        product = add_product(product, inputs, tl.trans(gradient))
        sums += within_documents(product, earliest, DOCUMENTS)
    else:
        sums = add_product(sums, inputs, tl.trans(gradient))
    return sums


@triton.jit
def backward_dot_stream(
    dy_ptr, x_ptr, f_ptr, dx_ptr, df_ptr, dbias_ptr, cos_ptr, sin_ptr, positions_ptr,
    segment, chunk, chunks, tiles_per_program, batch_size, length, width,
    dy_stride_b, dy_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """`tiles_per_program` tiles of one head of one stream: its columns from FIRST on, up to LAST.

    dy_ptr, x_ptr, f_ptr and dx_ptr point to the head. df_ptr is [programs, BLOCK, W] and dbias_ptr
    [programs / chunks, D], where each program leaves its sums. f_ptr and what is not asked for
    (dx_ptr, df_ptr, dbias_ptr) may be None.
    """
    DOCUMENTS: tl.constexpr = positions_ptr is not None
    WANTS_FILTERS: tl.constexpr = f_ptr is not None and df_ptr is not None
    rows = tl.arange(0, BLOCK)
    halo = tl.arange(0, max(HALO, 1))
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns >= FIRST) & (columns < (width if LAST is None else LAST))
    near_sums = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    far_sums = tl.zeros([BLOCK, max(HALO, 1)], dtype=tl.float32)
    if f_ptr is not None:
        near = taps_of_lags(f_ptr, rows[None, :] - rows[:, None], WINDOW)
        if HALO > 0:
            far = taps_of_lags(f_ptr, BLOCK + halo[None, :] - rows[:, None], WINDOW)
    # Of two rows that a thread has, it adds up the biases' gradients.
    bias_sums = tl.zeros([BLOCK // 2, COLUMNS], dtype=tl.float32)

    tiles_per_row = tl.cdiv(length, BLOCK)
    start = segment * tiles_per_program
    last = tl.minimum(start + tiles_per_program, batch_size * tiles_per_row)
    if chunk < 0:  # of the rotated columns of values, which have none: leaves zeros
        last = start
    for tile in range(start, last):
        batch = (tile // tiles_per_row).to(tl.int64)
        first = (tile % tiles_per_row) * BLOCK
        angles = batch * cos_stride_b
        dy_row = dy_ptr + batch * dy_stride_b
        dy = load_gradient(
            *(dy_row, dy_stride_t, cos_ptr, sin_ptr, angles, first, rows, length),
            *(columns, inside, ROTARY, ALIGNMENT),
        )
        if dbias_ptr is not None:
            pairs = tl.reshape(dy.to(tl.float32), [2, BLOCK // 2, COLUMNS])
            bias_sums += tl.sum(pairs, axis=0)
        if f_ptr is None:
            dx = dy
        else:
            dy = dy.to(x_ptr.dtype.element_ty)
            near_earliest = rows
            far_earliest = halo
            if DOCUMENTS:
                reach_ptr = positions_ptr + batch * length + first
                reach = tl.load(reach_ptr + rows, mask=first + rows < length, other=0)
                near_earliest = rows - reach
            if HALO > 0:
                after = load_gradient(
                    *(dy_row, dy_stride_t, cos_ptr, sin_ptr, angles, first + BLOCK, halo, length),
                    *(columns, inside, ROTARY, ALIGNMENT),
                ).to(x_ptr.dtype.element_ty)
                if DOCUMENTS:
                    far_earliest = earliest_of_halo(reach_ptr, first, length, BLOCK, HALO)
            if WANTS_FILTERS:
                x_row = x_ptr + batch * x_stride_b
                inputs = load_rows(x_row, first, rows, length, columns, inside, x_stride_t)
                near_sums = add_products(near_sums, inputs, dy, near_earliest, DOCUMENTS)
                if HALO > 0 and not in_two_loops(HALO):
                    far_sums = add_products(far_sums, inputs, after, far_earliest, DOCUMENTS)
            if dx_ptr is not None:
                matrix = within_documents(near, near_earliest, DOCUMENTS)
                dx = add_product(tl.zeros([BLOCK, COLUMNS], dtype=tl.float32), matrix, dy)
                if HALO > 0:
                    matrix = within_documents(far, far_earliest, DOCUMENTS)
                    dx = add_apart(dx, matrix, after)
        if dx_ptr is not None:
            dx_row = dx_ptr + batch * dx_stride_b
            store_rows(dx_row, dx, first, rows, length, columns, inside, dx_stride_t)

    if WANTS_FILTERS and in_two_loops(HALO):
        for tile in range(start, last):
            batch = (tile // tiles_per_row).to(tl.int64)
            first = (tile % tiles_per_row) * BLOCK
            after = load_gradient(
                *(
                    dy_ptr + batch * dy_stride_b,
                    dy_stride_t,
                    cos_ptr,
                    sin_ptr,
                    batch * cos_stride_b,
                ),
                *(first + BLOCK, halo, length, columns, inside, ROTARY, ALIGNMENT),
            ).to(x_ptr.dtype.element_ty)
            far_earliest = halo
            if DOCUMENTS:
                reach_ptr = positions_ptr + batch * length + first
                far_earliest = earliest_of_halo(reach_ptr, first, length, BLOCK, HALO)
            x_row = x_ptr + batch * x_stride_b
            inputs = load_rows(x_row, first, rows, length, columns, inside, x_stride_t)
            far_sums = add_products(far_sums, inputs, after, far_earliest, DOCUMENTS)

    # Not before the loops: an address would take registers through them.
    program = tl.program_id(0)
    if WANTS_FILTERS:
        # Every (step, lag) is met exactly once, in `near_sums` or in `far_sums`. Transposed, and by
        # the outputs' steps: lags and masks like those of the taps would be kept in registers
        # through the loops. Output k of input i is at i W + k − i.
        places = df_ptr + program.to(tl.int64) * (BLOCK * WINDOW) + rows[None, :] * (WINDOW - 1)
        lags = rows[:, None] - rows[None, :]
        mask = (lags >= 0) & (lags < WINDOW)
        tl.store(places + rows[:, None], tl.trans(near_sums), mask=mask)
        if HALO > 0:
            after = BLOCK + halo[:, None]
            tl.store(places + after, tl.trans(far_sums), mask=after - rows[None, :] < WINDOW)
    if dbias_ptr is not None:
        # Some thousands of programs: in 64 bits the width would take a register more.
        dbias_ptr += program // chunks * width
        tl.store(dbias_ptr + columns, tl.sum(bias_sums, axis=0), mask=inside)
