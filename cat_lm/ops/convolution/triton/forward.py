"""Forward kernels of the convolution per head or channel: one tensor, or packed q, k and v."""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.tiles import (
    VARYING,
    convolve_tile,
    load_rows,
    rotary_partners,
    rotated_columns,
    store_rows,
    taps_of_lags,
)


@triton.jit
def add_bias(outputs, bias_ptr, columns, inside):
    """outputs [BLOCK, columns] in fp32 and the bias of the columns; bias_ptr may be None."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
        outputs += bias.to(tl.float32)[None, :]
    return outputs


@triton.jit
def forward_stream(
    x_ptr, f_ptr, bias_ptr, y_ptr, cos_ptr, sin_ptr, positions_ptr,
    segment, chunk, tiles_per_program, batch_size, length, width,
    x_stride_b, x_stride_t, y_stride_b, y_stride_t, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr, PER_CHANNEL: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """One head of one stream: `tiles_per_program` tiles, beginning with tile number
    segment · tiles_per_program of all rows' tiles counted through.

    x_ptr, f_ptr, bias_ptr and y_ptr point to the head. f_ptr, bias_ptr and positions_ptr may be
    None; ROTARY = 0 leaves out the rotation.
    """
    DOCUMENTS: tl.constexpr = positions_ptr is not None
    rows = tl.arange(0, BLOCK)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    near = rows
    far = rows
    if USE_DOT and f_ptr is not None:
        near = taps_of_lags(f_ptr, rows[:, None] - rows[None, :], WINDOW)
        if HALO > 0:
            halo = tl.arange(0, HALO)
            far = taps_of_lags(f_ptr, HALO + rows[:, None] - halo[None, :], WINDOW)

    TURNED: tl.constexpr = rotated_columns(ROTARY, COLUMNS)
    tiles_per_row = tl.cdiv(length, BLOCK)
    start = segment * tiles_per_program
    last = tl.minimum(start + tiles_per_program, batch_size * tiles_per_row)
    for tile in range(start, last):
        batch = (tile // tiles_per_row).to(tl.int64)
        first = (tile % tiles_per_row) * BLOCK
        earliest = rows
        if DOCUMENTS:
            in_row = first + rows < length
            reach_ptr = positions_ptr + batch * length + first
            earliest = rows - tl.load(reach_ptr + rows, mask=in_row, other=0)
        source = x_ptr + batch * x_stride_b
        target = y_ptr + batch * y_stride_b
        if ROTARY == 0 or TURNED < COLUMNS:
            outputs = convolve_tile(
                *(source, x_stride_t, f_ptr, near, far, earliest, first, length),
                *(width, columns, inside, WINDOW, BLOCK, HALO, DOCUMENTS, PER_CHANNEL, USE_DOT),
            )
            outputs = add_bias(outputs, bias_ptr, columns, inside)
            passed = inside & (columns >= ROTARY)
            store_rows(target, outputs, first, rows, length, columns, passed, y_stride_t)
        if ROTARY > 0:
            turned = columns if TURNED == COLUMNS else tl.arange(0, TURNED)
            kept = inside if TURNED == COLUMNS else (turned < ROTARY) & (chunk == 0)
            rotated = kept & (turned < ROTARY)
            partners = rotary_partners(turned, ROTARY, ALIGNMENT)
            outputs = convolve_tile(
                *(source, x_stride_t, f_ptr, near, far, earliest, first, length),
                *(width, turned, kept, WINDOW, BLOCK, HALO, DOCUMENTS, PER_CHANNEL, USE_DOT),
            )
            outputs = add_bias(outputs, bias_ptr, turned, kept)
            # The partners' outputs are the convolution of the partners, which the caches still
            # hold, by their own filters or the head's.
            others = convolve_tile(
                *(source, x_stride_t, f_ptr, near, far, earliest, first, length),
                *(width, partners, rotated, WINDOW, BLOCK, HALO, DOCUMENTS, PER_CHANNEL, USE_DOT),
            )
            others = add_bias(others, bias_ptr, partners, rotated)
            others = tl.where(turned[None, :] < ROTARY // 2, -others, others)
            angles = batch * cos_stride_b
            cosines = load_rows(cos_ptr + angles, first, rows, length, turned, rotated, ROTARY)
            sines = load_rows(sin_ptr + angles, first, rows, length, turned, rotated, ROTARY)
            combined = outputs * cosines.to(tl.float32) + others * sines.to(tl.float32)
            outputs = tl.where(rotated[None, :], combined, outputs)
            store_rows(target, outputs, first, rows, length, turned, kept, y_stride_t)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x_ptr, f_ptr, bias_ptr, y_ptr, cos_ptr, sin_ptr, positions_ptr,
    tiles_per_program, batch_size, length, heads, width,
    x_stride_b, x_stride_t, x_stride_h, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr, PER_CHANNEL: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """y = RoPE(F * x + bias) for x [B, T, H, D] with any strides but 1 in D; y is [B, T, H, D].

    Filters are [H, W], or [H, W, D] if PER_CHANNEL.

    Channels, then heads count fastest in the grid, so that programs that run at the same time read
    neighbours in memory.
    """
    program = tl.program_id(0)
    chunks = tl.cdiv(width, COLUMNS)
    chunk = program % chunks
    head = (program // chunks % heads).to(tl.int64)
    segment = program // chunks // heads
    if bias_ptr is not None:
        bias_ptr += head * width
    y_stride_t = heads * width
    y_stride_b = tl.cast(y_stride_t, tl.int64) * length
    forward_stream(
        x_ptr + head * x_stride_h,
        f_ptr + head * (WINDOW * width if PER_CHANNEL else WINDOW),
        bias_ptr,
        y_ptr + head * width,
        *(cos_ptr, sin_ptr, positions_ptr, segment, chunk, tiles_per_program),
        *(batch_size, length, width, x_stride_b, x_stride_t, y_stride_b, y_stride_t, cos_stride_b),
        *(WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT, PER_CHANNEL, USE_DOT),
    )


@triton.jit(do_not_specialize=VARYING)
def forward_qkv_kernel(
    x_ptr, q_filter_ptr, k_filter_ptr, v_filter_ptr, bias_ptr, q_ptr, k_ptr, v_ptr, cos_ptr,
    sin_ptr, positions_ptr,
    tiles_per_program, batch_size, length, heads, width,
    x_stride_b, x_stride_t, x_stride_h, x_stride_s, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """q, k, v [B, T, H, D] from x [B, T, H, 3, D]; channels, streams and heads count fastest.

    A branch per stream, so that each is compiled with what it has: filter or none, rotation or
    none.
    """
    program = tl.program_id(0)
    chunks = tl.cdiv(width, COLUMNS)
    chunk = program % chunks
    stream = program // chunks % 3
    head = (program // chunks // 3 % heads).to(tl.int64)
    segment = program // chunks // 3 // heads
    x_ptr += head * x_stride_h + stream * x_stride_s
    place = head * width
    y_stride_t = heads * width
    y_stride_b = tl.cast(y_stride_t, tl.int64) * length
    if bias_ptr is not None:
        bias_ptr += (head * 3 + stream) * width
    if stream == 0:
        if q_filter_ptr is not None:
            q_filter_ptr += head * WINDOW
        forward_stream(
            *(x_ptr, q_filter_ptr, bias_ptr, q_ptr + place, cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, tiles_per_program, batch_size, length, width),
            *(x_stride_b, x_stride_t, y_stride_b, y_stride_t, cos_stride_b),
            *(WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT, False, USE_DOT),
        )
    elif stream == 1:
        if k_filter_ptr is not None:
            k_filter_ptr += head * WINDOW
        forward_stream(
            *(x_ptr, k_filter_ptr, bias_ptr, k_ptr + place, cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, tiles_per_program, batch_size, length, width),
            *(x_stride_b, x_stride_t, y_stride_b, y_stride_t, cos_stride_b),
            *(WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT, False, USE_DOT),
        )
    else:
        if v_filter_ptr is not None:
            v_filter_ptr += head * WINDOW
        forward_stream(
            *(x_ptr, v_filter_ptr, bias_ptr, v_ptr + place, None, None, positions_ptr),
            *(segment, chunk, tiles_per_program, batch_size, length, width),
            *(x_stride_b, x_stride_t, y_stride_b, y_stride_t, 0),
            *(WINDOW, BLOCK, HALO, COLUMNS, 0, 1, False, USE_DOT),
        )
