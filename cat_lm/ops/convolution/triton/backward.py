"""The backward kernel of the convolution per head or channel: one tensor, or packed q, k and v.

With matrix products, for an input at step i of a tile and an output at step k of the tile and the
HALO after it, which meet at lag k − i,

    dX = Mᵀ dY,   Mᵀ[i, k] = F[k − i],       dF[j] = sum over k − i = j of (X dYᵀ)[i, k].

The products X dYᵀ of a program's tiles are summed in registers and written once, each at its lag:
[programs, heads, BLOCK, W] numbers whose sum over programs and BLOCK is dF. Columns do not mix in
dX and are summed in X dYᵀ. So programs of their own have the rotated ones (`rotated_columns`), each
of whose gradients is made of two: others need no registers for angles.

Without, the sums over lags are taken as they are defined. Sums over programs are taken afterwards,
in a fixed order; there are no atomics.

A head's dy, x and dx are pointers with the strides of rows and steps; `angles` are cos_ptr, sin_ptr
and the stride of rows. What is not asked for (dx, df_ptr, dbias_ptr) has no pointer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.tiles import (
    VARYING,
    add_product,
    add_separately,
    earliest_inputs,
    has_rotated_tile,
    load_rows,
    rotary_partners,
    rotated_columns,
    store_rows,
    taps_of_channels,
    taps_of_lags,
)


@triton.jit
def load_gradient(dy, angles, batch, first, rows, length, columns, inside, ROTARY: tl.constexpr):
    """Load the gradient of the convolution's outputs: the results' gradient, rotated back."""
    dy_ptr, stride_b, stride_t = dy
    dy_ptr += batch * stride_b
    gradient = load_rows(dy_ptr, first, rows, length, columns, inside, stride_t)
    if ROTARY > 0:
        cos_ptr, sin_ptr, cos_stride_b = angles
        start = batch * cos_stride_b
        partners = rotary_partners(columns, ROTARY)
        rotated = inside & (columns < ROTARY)
        others = load_rows(dy_ptr, first, rows, length, partners, rotated, stride_t)
        cosines = load_rows(cos_ptr + start, first, rows, length, columns, rotated, ROTARY)
        sines = load_rows(sin_ptr + start, first, rows, length, partners, rotated, ROTARY)
        others = others.to(tl.float32) * sines.to(tl.float32)
        others = tl.where(columns[None, :] < ROTARY // 2, others, -others)
        gradient = gradient.to(tl.float32)
        turned = gradient * cosines.to(tl.float32) + others
        gradient = tl.where(rotated[None, :], turned, gradient)
    return gradient


@triton.constexpr_function
def in_two_loops(halo):
    """Return True if products with a halo get their own loop, because they fill the registers."""
    return halo > 64


@triton.jit
def within_documents(numbers, earliest, DOCUMENTS: tl.constexpr):
    """Zero entries of [BLOCK, K] where output k does not read input i, for earliest[k]."""
    if DOCUMENTS:
        rows = tl.arange(0, numbers.shape[0])
        numbers = tl.where(rows[:, None] >= earliest[None, :], numbers, 0.0)
    return numbers


@triton.jit
def add_products(sums, inputs, gradient, earliest, DOCUMENTS: tl.constexpr):
    """Return sums + X dYᵀ [BLOCK, K], within documents."""
    if DOCUMENTS:
        product = tl.zeros(sums.shape, dtype=tl.float32)
        product = add_product(product, inputs, tl.trans(gradient))
        sums += within_documents(product, earliest, DOCUMENTS)
    else:
        sums = add_product(sums, inputs, tl.trans(gradient))
    return sums


@triton.jit
def store_filter_sums(df_ptr, near_sums, far_sums, TILE: tl.constexpr):
    """Write each sum at its step and lag: every pair is in `near_sums` or in `far_sums`, once.

    Transposed, and by the outputs' steps: lags and masks like those of the taps would be kept in
    registers through the loops. Output k of input i is at i W + k − i.
    """
    rows = tl.arange(0, TILE.block)
    start = df_ptr + tl.program_id(0).to(tl.int64) * (TILE.block * TILE.window)
    places = start + rows[None, :] * (TILE.window - 1)
    lags = rows[:, None] - rows[None, :]
    mask = (lags >= 0) & (lags < TILE.window)
    tl.store(places + rows[:, None], tl.trans(near_sums), mask=mask)
    if TILE.halo > 0:
        after = TILE.block + tl.arange(0, TILE.halo)[:, None]
        tl.store(places + after, tl.trans(far_sums), mask=after - rows[None, :] < TILE.window)


@triton.jit
def backward_dot_stream(
    streams,
    sums,
    angles,
    program,
    sizes,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
):
    """`tiles_per_program` tiles of one head of one stream: its columns from FIRST on, up to LAST.

    Each program leaves its sums in df_ptr, [programs, BLOCK, W], and dbias_ptr, [programs / chunks,
    D].
    """
    dy, x, f_ptr, dx, positions_ptr = streams
    x_ptr, x_stride_b, x_stride_t = x
    dx_ptr, dx_stride_b, dx_stride_t = dx
    df_ptr, dbias_ptr = sums
    segment, chunk, chunks = program
    tiles_per_program, batch_size, length, width = sizes
    DOCUMENTS: tl.constexpr = positions_ptr is not None
    WANTS_FILTERS: tl.constexpr = f_ptr is not None and df_ptr is not None
    BLOCK: tl.constexpr = TILE.block
    HALO: tl.constexpr = TILE.halo
    rows = tl.arange(0, BLOCK)
    halo = tl.arange(0, max(HALO, 1))
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns >= FIRST) & (columns < (width if LAST is None else LAST))
    near_sums = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    far_sums = tl.zeros([BLOCK, max(HALO, 1)], dtype=tl.float32)
    if f_ptr is not None:
        near = taps_of_lags(f_ptr, rows[None, :] - rows[:, None], TILE.window)
        if HALO > 0:
            far = taps_of_lags(f_ptr, BLOCK + halo[None, :] - rows[:, None], TILE.window)
    # Of two rows that a thread has, it adds up the biases' gradients.
    bias_sums = tl.zeros([BLOCK // 2, COLUMNS], dtype=tl.float32)

    tiles_per_row = tl.cdiv(length, BLOCK)
    start = segment * tiles_per_program
    last = tl.minimum(start + tiles_per_program, batch_size * tiles_per_row)
    if chunk < 0:  # Values have no rotated columns: leave zeros.
        last = start
    for tile in range(start, last):
        batch = (tile // tiles_per_row).to(tl.int64)
        first = (tile % tiles_per_row) * BLOCK
        gradient = load_gradient(dy, angles, batch, first, rows, length, columns, inside, ROTARY)
        if dbias_ptr is not None:
            pairs = tl.reshape(gradient.to(tl.float32), [2, BLOCK // 2, COLUMNS])
            bias_sums += tl.sum(pairs, axis=0)
        if f_ptr is None:
            found = gradient
        else:
            gradient = gradient.to(x_ptr.dtype.element_ty)
            near_earliest = earliest_inputs(positions_ptr, batch, first, length, 0, BLOCK)
            if HALO > 0:
                after = load_gradient(
                    dy, angles, batch, first + BLOCK, halo, length, columns, inside, ROTARY
                ).to(x_ptr.dtype.element_ty)
                far_earliest = earliest_inputs(positions_ptr, batch, first, length, BLOCK, HALO)
            if WANTS_FILTERS:
                x_row = x_ptr + batch * x_stride_b
                inputs = load_rows(x_row, first, rows, length, columns, inside, x_stride_t)
                near_sums = add_products(near_sums, inputs, gradient, near_earliest, DOCUMENTS)
                if HALO > 0 and not in_two_loops(HALO):
                    far_sums = add_products(far_sums, inputs, after, far_earliest, DOCUMENTS)
            if dx_ptr is not None:
                matrix = within_documents(near, near_earliest, DOCUMENTS)
                found = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
                found = add_product(found, matrix, gradient)
                if HALO > 0:
                    matrix = within_documents(far, far_earliest, DOCUMENTS)
                    found = add_separately(found, matrix, after)
        if dx_ptr is not None:
            dx_row = dx_ptr + batch * dx_stride_b
            store_rows(dx_row, found, first, rows, length, columns, inside, dx_stride_t)

    if WANTS_FILTERS and in_two_loops(HALO):
        for tile in range(start, last):
            batch = (tile // tiles_per_row).to(tl.int64)
            first = (tile % tiles_per_row) * BLOCK
            after = load_gradient(
                dy, angles, batch, first + BLOCK, halo, length, columns, inside, ROTARY
            ).to(x_ptr.dtype.element_ty)
            far_earliest = earliest_inputs(positions_ptr, batch, first, length, BLOCK, HALO)
            x_row = x_ptr + batch * x_stride_b
            inputs = load_rows(x_row, first, rows, length, columns, inside, x_stride_t)
            far_sums = add_products(far_sums, inputs, after, far_earliest, DOCUMENTS)

    # Not before the loops: an address would take registers through them.
    if WANTS_FILTERS:
        store_filter_sums(df_ptr, near_sums, far_sums, TILE)
    if dbias_ptr is not None:
        # Some thousands of programs: in 64 bits the width would take a register more.
        dbias_ptr += tl.program_id(0) // chunks * width
        tl.store(dbias_ptr + columns, tl.sum(bias_sums, axis=0), mask=inside)


@triton.jit
def backward_shift_stream(
    streams, sums, angles, program, sizes, ROTARY: tl.constexpr, TILE: tl.constexpr
):
    """One tile of one head of one stream, lag by lag, in fp32.

    As `backward_dot_stream`, but df_ptr is [programs, W], or [programs / chunks, W, D] for filters
    per channel.
    """
    dy, x, f_ptr, dx, positions_ptr = streams
    x_ptr, x_stride_b, x_stride_t = x
    dx_ptr, dx_stride_b, dx_stride_t = dx
    df_ptr, dbias_ptr = sums
    tile, chunk, chunks = program
    _tiles_per_program, _batch_size, length, width = sizes
    BLOCK: tl.constexpr = TILE.block
    COLUMNS: tl.constexpr = TILE.columns
    rows = tl.arange(0, BLOCK)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    tiles_per_row = tl.cdiv(length, TILE.block)
    batch = (tile // tiles_per_row).to(tl.int64)
    first = (tile % tiles_per_row) * TILE.block
    number = tl.program_id(0).to(tl.int64)
    if df_ptr is not None:
        if TILE.per_channel:
            df_ptr += number // chunks * (TILE.window * width)
        else:
            df_ptr += number * TILE.window
    lags = 1
    if f_ptr is not None:
        lags = TILE.window
        x_row = x_ptr + batch * x_stride_b
        inputs = load_rows(x_row, first, rows, length, columns, inside, x_stride_t).to(tl.float32)
    found = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
    for lag in range(lags):
        gradient = load_gradient(
            dy, angles, batch, first + lag, rows, length, columns, inside, ROTARY
        ).to(tl.float32)
        if f_ptr is None:
            found = gradient
        else:
            if positions_ptr is not None:
                times = first + lag + rows
                reach_ptr = positions_ptr + batch * length + times
                reach = tl.load(reach_ptr, mask=times < length, other=0)
                gradient = tl.where((lag <= reach)[:, None], gradient, 0.0)
            taps = taps_of_channels(f_ptr, lag, width, columns, inside, TILE.per_channel)
            found += gradient * taps
            if df_ptr is not None:
                product = gradient * inputs
                if TILE.per_channel:
                    of_columns = tl.sum(product, axis=0)
                    tl.store(df_ptr + lag * width + columns, of_columns, mask=inside)
                else:
                    tl.store(df_ptr + lag, tl.sum(product))
    if dx_ptr is not None:
        dx_row = dx_ptr + batch * dx_stride_b
        store_rows(dx_row, found, first, rows, length, columns, inside, dx_stride_t)
    if dbias_ptr is not None:
        gradient = load_gradient(dy, angles, batch, first, rows, length, columns, inside, ROTARY)
        dbias_ptr += number // chunks * width
        tl.store(dbias_ptr + columns, tl.sum(gradient.to(tl.float32), axis=0), mask=inside)


@triton.jit
def backward_stream(
    dy,
    x,
    f_ptr,
    dx,
    positions_ptr,
    sums,
    angles,
    program,
    sizes,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the backward pass of one head of one stream, as TILE.use_dot selects."""
    head, segment, chunk, chunks = program
    if f_ptr is not None:
        f_ptr += head * (TILE.window * sizes[3] if TILE.per_channel else TILE.window)
    streams = (dy, x, f_ptr, dx, positions_ptr)
    here = (segment, chunk, chunks)
    if not TILE.use_dot:
        backward_shift_stream(streams, sums, angles, here, sizes, ROTARY, TILE)
    elif not has_rotated_tile(ROTARY, TILE.columns):
        backward_dot_stream(streams, sums, angles, here, sizes, TILE.columns, 0, None, ROTARY, TILE)
    elif chunk == 0:
        COLUMNS: tl.constexpr = rotated_columns(ROTARY, TILE.columns)
        backward_dot_stream(streams, sums, angles, here, sizes, COLUMNS, 0, ROTARY, ROTARY, TILE)
    else:
        here = (segment, chunk - 1, chunks)
        backward_dot_stream(
            streams, sums, (None, None, 0), here, sizes, TILE.columns, ROTARY, None, 0, TILE
        )


@triton.jit
def rows_of_head(x, head):
    """Return a pointer to a head of x [B, T, H, D], and the strides of rows and steps."""
    x_ptr, stride_b, stride_t, stride_h = x
    return x_ptr + head * stride_h, stride_b, stride_t


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    gradients,
    x,
    filters,
    dx_ptr,
    sums,
    angles,
    positions_ptr,
    tiles_per_program,
    batch_size,
    length,
    shape,
    TILE: tl.constexpr,
):
    """Gradients of `forward_kernel`: dx [B, T, H, (3,) D] and each program's sums for df and dbias.

    There is a chunk more where rotated columns are one of their own, the first; values have none
    there.

    Args:
        gradients: of q, k and v, or of one stream and None: each a pointer, and the strides of
            rows, steps and heads.
        sums: df_ptr, [segments, H, (3,) chunks, BLOCK, W] with matrix products, [segments, H, (3,)
            chunks, W] without and [segments, H, W, D] for filters per channel; and dbias_ptr,
            [segments, H, (3,) D].
        x, filters, angles, shape: as in `forward_kernel`.
    """
    x_ptr, x_stride_b, x_stride_t, x_stride_h, x_stride_s = x
    heads, width = shape
    program = tl.program_id(0)
    APART: tl.constexpr = 1 if TILE.use_dot and has_rotated_tile(TILE.rotary, TILE.columns) else 0
    chunks = tl.cdiv(width, TILE.columns) + APART
    chunk = program % chunks
    stream = program // chunks % TILE.streams
    head = (program // chunks // TILE.streams % heads).to(tl.int64)
    segment = program // chunks // TILE.streams // heads
    own = (x_ptr + head * x_stride_h + stream * x_stride_s, x_stride_b, x_stride_t)
    dx_stride_t = heads * TILE.streams * width
    if dx_ptr is not None:
        dx_ptr += (head * TILE.streams + stream) * width
    dx = (dx_ptr, tl.cast(dx_stride_t, tl.int64) * length, dx_stride_t)
    here = (head, segment, chunk, chunks)
    sizes = (tiles_per_program, batch_size, length, width)
    rest = (dx, positions_ptr, sums)
    if TILE.streams == 1 or stream == 0:
        dy = rows_of_head(gradients[0], head)
        backward_stream(dy, own, filters[0], *rest, angles, here, sizes, TILE.rotary, TILE)
    elif stream == 1:
        dy = rows_of_head(gradients[1], head)
        backward_stream(dy, own, filters[1], *rest, angles, here, sizes, TILE.rotary, TILE)
    else:
        dy = rows_of_head(gradients[2], head)
        here = (head, segment, chunk - APART, chunks)
        backward_stream(dy, own, filters[2], *rest, (None, None, 0), here, sizes, 0, TILE)
