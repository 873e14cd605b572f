"""The backward kernel of packed queries, keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from cat_lm.ops.convolution.triton.backward import backward_stream
from cat_lm.ops.convolution.triton.tiles import VARYING, rotates_apart


@triton.jit(do_not_specialize=VARYING)
def backward_qkv_kernel(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, q_filter_ptr, k_filter_ptr, v_filter_ptr, dx_ptr, df_ptr,
    dbias_ptr, cos_ptr, sin_ptr, positions_ptr,
    tiles_per_program, batch_size, length, heads, width,
    dq_stride_b, dq_stride_t, dq_stride_h, dk_stride_b, dk_stride_t, dk_stride_h, dv_stride_b,
    dv_stride_t, dv_stride_h, x_stride_b, x_stride_t, x_stride_h, x_stride_s, cos_stride_b,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HALO: tl.constexpr, COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, ALIGNMENT: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of `forward_qkv_kernel`: dx [B, T, H, 3, D] and each program's sums.

    df_ptr is [segments, H, 3, chunks, BLOCK, W] with matrix products, [segments, H, 3, chunks, W]
    without; dbias_ptr is [segments, H, 3, D]. There is a chunk more where rotated columns are one
    of their own, the first; values have none there.
    """
    program = tl.program_id(0)
    APART: tl.constexpr = 1 if USE_DOT and rotates_apart(ROTARY, COLUMNS) else 0
    chunks = tl.cdiv(width, COLUMNS) + APART
    chunk = program % chunks
    stream = program // chunks % 3
    head = (program // chunks // 3 % heads).to(tl.int64)
    segment = program // chunks // 3 // heads
    x_ptr += head * x_stride_h + stream * x_stride_s
    dx_stride_t = heads * 3 * width
    dx_stride_b = tl.cast(dx_stride_t, tl.int64) * length
    if dx_ptr is not None:
        dx_ptr += (head * 3 + stream) * width
    if stream == 0:
        if q_filter_ptr is not None:
            q_filter_ptr += head * WINDOW
        backward_stream(
            *(dq_ptr + head * dq_stride_h, x_ptr, q_filter_ptr, dx_ptr, df_ptr, dbias_ptr),
            *(cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, chunks, tiles_per_program, batch_size, length, width),
            *(dq_stride_b, dq_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
            *(cos_stride_b, WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT, False, USE_DOT),
        )
    elif stream == 1:
        if k_filter_ptr is not None:
            k_filter_ptr += head * WINDOW
        backward_stream(
            *(dk_ptr + head * dk_stride_h, x_ptr, k_filter_ptr, dx_ptr, df_ptr, dbias_ptr),
            *(cos_ptr, sin_ptr, positions_ptr),
            *(segment, chunk, chunks, tiles_per_program, batch_size, length, width),
            *(dk_stride_b, dk_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
            *(cos_stride_b, WINDOW, BLOCK, HALO, COLUMNS, ROTARY, ALIGNMENT, False, USE_DOT),
        )
    else:
        if v_filter_ptr is not None:
            v_filter_ptr += head * WINDOW
        backward_stream(
            *(dv_ptr + head * dv_stride_h, x_ptr, v_filter_ptr, dx_ptr, df_ptr, dbias_ptr),
            *(None, None, positions_ptr),
            *(segment, chunk - APART, chunks, tiles_per_program, batch_size, length, width),
            *(dv_stride_b, dv_stride_t, x_stride_b, x_stride_t, dx_stride_b, dx_stride_t),
            *(0, WINDOW, BLOCK, HALO, COLUMNS, 0, 1, False, USE_DOT),
        )
