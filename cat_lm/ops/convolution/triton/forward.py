"""The forward kernel of the convolution per head or channel: one tensor, or packed q, k and v."""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.tiles import (
    VARYING,
    add_product,
    add_separately,
    earliest_inputs,
    load_rows,
    rotary_partners,
    rotated_columns,
    store_rows,
    taps_of_channels,
    taps_of_lags,
)


@triton.jit
def toeplitz_matrix(f_ptr, TILE: tl.constexpr):
    """Load the two parts, near and far, of the Toeplitz matrix that all tiles of a head share."""
    rows = tl.arange(0, TILE.block)
    near = rows
    far = rows
    if TILE.use_dot and f_ptr is not None:
        near = taps_of_lags(f_ptr, rows[:, None] - rows[None, :], TILE.window)
        if TILE.halo > 0:
            halo = tl.arange(0, TILE.halo)
            far = taps_of_lags(f_ptr, TILE.halo + rows[:, None] - halo[None, :], TILE.window)
    return near, far


@triton.jit
def convolve_tile(
    x, f_ptr, bias_ptr, matrix, place, columns, inside, DOCUMENTS: tl.constexpr, TILE: tl.constexpr
):
    """Outputs first … first + BLOCK − 1 in fp32: [BLOCK, COLUMNS].

    Args:
        x: a pointer to the row, and the stride of steps.
        f_ptr, bias_ptr: of the head; None for x itself, and for no bias.
        matrix: near [BLOCK, BLOCK] and far [BLOCK, HALO], of which TILE.use_dot makes products.
        place: first, length and width; and, with DOCUMENTS, the first step that each output may
            read, [BLOCK], counted from `first`, so that a mask compares two vectors.
    """
    x_ptr, x_stride = x
    near, far = matrix
    first, length, width, earliest = place
    BLOCK: tl.constexpr = TILE.block
    rows = tl.arange(0, BLOCK)
    if f_ptr is None:
        outputs = load_rows(x_ptr, first, rows, length, columns, inside, x_stride).to(tl.float32)
    elif TILE.use_dot:
        inputs = load_rows(x_ptr, first, rows, length, columns, inside, x_stride)
        if DOCUMENTS:
            near = tl.where(rows[None, :] >= earliest[:, None], near, 0.0)
        outputs = tl.zeros([BLOCK, columns.shape[0]], dtype=tl.float32)
        outputs = add_product(outputs, near, inputs)
        if TILE.halo > 0:
            HALO: tl.constexpr = TILE.halo
            halo = tl.arange(0, HALO)
            before = load_rows(x_ptr, first - HALO, halo, length, columns, inside, x_stride, True)
            if DOCUMENTS:
                far = tl.where((halo - HALO)[None, :] >= earliest[:, None], far, 0.0)
                outputs = add_separately(outputs, far, before)
            else:  # With four warps, the unit's own sum needs fewer registers.
                outputs = add_product(outputs, far, before)
    else:
        outputs = tl.zeros([BLOCK, columns.shape[0]], dtype=tl.float32)
        for lag in tl.range(0, TILE.window, loop_unroll_factor=2):
            times = first - lag + rows
            allowed = (times >= 0) & (times < length)
            if DOCUMENTS:
                allowed = allowed & (rows - lag >= earliest)
            start = x_ptr + (first - lag).to(tl.int64) * x_stride
            delayed = tl.load(
                start + rows[:, None] * x_stride + columns[None, :],
                mask=allowed[:, None] & inside[None, :],
                other=0.0,
            )
            taps = taps_of_channels(f_ptr, lag, width, columns, inside, TILE.per_channel)
            outputs += taps * delayed.to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
        outputs += bias.to(tl.float32)[None, :]
    return outputs


@triton.jit
def rotate_outputs(outputs, others, angles, place, columns, rotated, ROTARY: tl.constexpr):
    """Rotate outputs [BLOCK, COLUMNS] with those of the columns' partners."""
    cos_ptr, sin_ptr = angles
    first, length, _width, _earliest = place
    rows = tl.arange(0, outputs.shape[0])
    others = tl.where(columns[None, :] < ROTARY // 2, -others, others)
    cosines = load_rows(cos_ptr, first, rows, length, columns, rotated, ROTARY)
    sines = load_rows(sin_ptr, first, rows, length, columns, rotated, ROTARY)
    combined = outputs * cosines.to(tl.float32) + others * sines.to(tl.float32)
    return tl.where(rotated[None, :], combined, outputs)


@triton.jit
def forward_stream(
    x,
    f_ptr,
    bias_ptr,
    y_ptr,
    angles,
    positions_ptr,
    program,
    counts,
    shape,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head of one stream: `tiles_per_program` tiles, beginning with tile number
    segment · tiles_per_program of all rows' tiles counted through.

    Args:
        x: a pointer to the head, and the strides of rows and steps.
        angles: as in `forward_kernel`; ROTARY = 0 leaves out the rotation.
        program: head, segment, and chunk of columns.
    """
    x_ptr, x_stride_b, x_stride_t = x
    cos_ptr, sin_ptr, cos_stride_b = angles
    head, segment, chunk = program
    tiles_per_program, batch_size, length = counts
    heads, width = shape
    DOCUMENTS: tl.constexpr = positions_ptr is not None
    COLUMNS: tl.constexpr = TILE.columns
    TURNED: tl.constexpr = rotated_columns(ROTARY, COLUMNS)
    if f_ptr is not None:
        f_ptr += head * (TILE.window * width if TILE.per_channel else TILE.window)
    y_ptr += head * width
    y_stride_t = heads * width
    y_stride_b = tl.cast(y_stride_t, tl.int64) * length
    rows = tl.arange(0, TILE.block)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    matrix = toeplitz_matrix(f_ptr, TILE)
    tiles_per_row = tl.cdiv(length, TILE.block)
    start = segment * tiles_per_program
    last = tl.minimum(start + tiles_per_program, batch_size * tiles_per_row)
    for tile in range(start, last):
        batch = (tile // tiles_per_row).to(tl.int64)
        first = (tile % tiles_per_row) * TILE.block
        earliest = earliest_inputs(positions_ptr, batch, first, length, 0, TILE.block)
        place = (first, length, width, earliest)
        row = (x_ptr + batch * x_stride_b, x_stride_t)
        target = y_ptr + batch * y_stride_b
        if ROTARY == 0 or TURNED < COLUMNS:
            outputs = convolve_tile(
                row, f_ptr, bias_ptr, matrix, place, columns, inside, DOCUMENTS, TILE
            )
            passed = inside & (columns >= ROTARY)
            store_rows(target, outputs, first, rows, length, columns, passed, y_stride_t)
        if ROTARY > 0:
            turned = columns if TURNED == COLUMNS else tl.arange(0, TURNED)
            kept = inside if TURNED == COLUMNS else (turned < ROTARY) & (chunk == 0)
            rotated = kept & (turned < ROTARY)
            partners = rotary_partners(turned, ROTARY)
            outputs = convolve_tile(
                row, f_ptr, bias_ptr, matrix, place, turned, kept, DOCUMENTS, TILE
            )
            # The partners' outputs are the convolution of the partners, which the caches still
            # hold, by their own filters or the head's.
            others = convolve_tile(
                row, f_ptr, bias_ptr, matrix, place, partners, rotated, DOCUMENTS, TILE
            )
            at = (cos_ptr + batch * cos_stride_b, sin_ptr + batch * cos_stride_b)
            outputs = rotate_outputs(outputs, others, at, place, turned, rotated, ROTARY)
            store_rows(target, outputs, first, rows, length, turned, kept, y_stride_t)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x,
    filters,
    bias_ptr,
    outputs,
    angles,
    positions_ptr,
    tiles_per_program,
    batch_size,
    length,
    shape,
    TILE: tl.constexpr,
):
    """Compute RoPE(F * x + bias) of x [B, T, H, (3,) D], with any strides but 1 in D.

    Channels, streams and heads count fastest in the grid, so that programs that run at the same
    time read neighbours in memory. A branch per stream, so that each is compiled with what it has:
    filter or none, rotation or none.

    Args:
        x: a pointer, and the strides of rows, steps, heads and streams.
        filters, outputs: pointers of q, k and v, or of one stream and None; outputs are [B, T, H,
            D] each.
        angles: cos_ptr, sin_ptr and the stride of rows.
        shape: heads, width.
    """
    x_ptr, x_stride_b, x_stride_t, x_stride_h, x_stride_s = x
    heads, width = shape
    program = tl.program_id(0)
    chunks = tl.cdiv(width, TILE.columns)
    chunk = program % chunks
    stream = program // chunks % TILE.streams
    head = (program // chunks // TILE.streams % heads).to(tl.int64)
    segment = program // chunks // TILE.streams // heads
    own = (x_ptr + head * x_stride_h + stream * x_stride_s, x_stride_b, x_stride_t)
    if bias_ptr is not None:
        bias_ptr += (head * TILE.streams + stream) * width
    counts = (tiles_per_program, batch_size, length)
    rest = (positions_ptr, (head, segment, chunk), counts, shape)
    if TILE.streams == 1 or stream == 0:
        forward_stream(own, filters[0], bias_ptr, outputs[0], angles, *rest, TILE.rotary, TILE)
    elif stream == 1:
        forward_stream(own, filters[1], bias_ptr, outputs[1], angles, *rest, TILE.rotary, TILE)
    else:
        none = (None, None, 0)
        forward_stream(own, filters[2], bias_ptr, outputs[2], none, *rest, 0, TILE)
