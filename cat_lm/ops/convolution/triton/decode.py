"""One token of decoding in one kernel: convolution, bias, activation and rotation of q, k and v.

Composed of the operators for sequences, a token costs a layer over a dozen launches of a few
microseconds' work each. Here a program has one head of one stream of one row: it reads the W−1
inputs before the token, sums in fp32, and writes them on, moved by one, with the token's own.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cat_lm.ops.convolution.kinds import KERNEL_NUMBERS
from cat_lm.ops.convolution.triton.tiles import rotary_partners

MOST_LAGS = 32  # the most lags that are loaded at a time
_HEAD = tl.constexpr(KERNEL_NUMBERS["head"])
_DEPTHWISE = tl.constexpr(KERNEL_NUMBERS["depthwise"])
_MULTIHEAD = tl.constexpr(KERNEL_NUMBERS["multihead"])


class Step(NamedTuple):
    """The compile-time constants of the kernel: `lags` loaded at a time, `rotary` channels."""

    window: int
    lags: int
    columns: int
    rotary: int
    kind: int
    silu: bool


@triton.jit
def _convolve_step(
    x_ptr, past_ptr, f_ptr, bias_ptr, head, sizes, columns, inside, STEP: tl.constexpr
):
    """Return the token's convolution at some channels of a head, [COLUMNS] in fp32."""
    heads, rows, _next_rows, width, x_step, past_step = sizes
    KIND: tl.constexpr = STEP.kind
    LAGS: tl.constexpr = STEP.lags
    COLUMNS: tl.constexpr = STEP.columns
    if f_ptr is None:
        sums = tl.load(x_ptr + head * x_step + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        sums = tl.zeros([COLUMNS], tl.float32)
        first = 0 if KIND == _MULTIHEAD else head
        last = heads if KIND == _MULTIHEAD else head + 1
        for source in range(first, last):
            token = tl.load(x_ptr + source * x_step + columns, mask=inside, other=0.0)
            for begin in range(0, STEP.window, LAGS):
                lags = begin + tl.arange(0, LAGS)
                seen = (lags >= 1) & (lags < STEP.window) & (lags <= rows)
                place = ((rows - lags) * heads + source) * past_step
                inputs = tl.load(
                    past_ptr + place[:, None] + columns[None, :],
                    mask=seen[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                inputs = tl.where((lags == 0)[:, None], token.to(tl.float32)[None, :], inputs)
                within = lags < STEP.window
                if KIND == _DEPTHWISE:
                    taps = tl.load(
                        f_ptr + (head * width + columns[None, :]) * STEP.window + lags[:, None],
                        mask=within[:, None] & inside[None, :],
                        other=0.0,
                    ).to(tl.float32)
                elif KIND == _HEAD:
                    taps = tl.load(f_ptr + head * STEP.window + lags, mask=within, other=0.0)
                    taps = taps.to(tl.float32)[:, None]
                else:
                    place = (lags * heads + head) * heads + source
                    taps = tl.load(f_ptr + place, mask=within, other=0.0)
                    taps = taps.to(tl.float32)[:, None]
                sums += tl.sum(inputs * taps, axis=0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head * x_step + columns, mask=inside, other=0.0)
        sums += bias.to(tl.float32)
    if STEP.silu and f_ptr is not None:
        sums *= tl.sigmoid(sums)
    return sums


@triton.jit
def _decode_stream(stream, angles, batch, head, sizes, ROTARY: tl.constexpr, STEP: tl.constexpr):
    """Decode one head of one stream; pointers are to the stream's first number."""
    x_ptr, past_ptr, f_ptr, bias_ptr, y_ptr, next_ptr = stream
    heads, rows, next_rows, width, x_step, past_step = sizes
    columns = tl.arange(0, STEP.columns)
    inside = columns < width
    x_ptr += batch * heads * x_step
    if f_ptr is not None:
        past_ptr += batch * rows * heads * past_step
        next_ptr += batch * next_rows * heads * past_step
    y = _convolve_step(x_ptr, past_ptr, f_ptr, bias_ptr, head, sizes, columns, inside, STEP)
    if ROTARY > 0:
        cos_ptr, sin_ptr, cos_stride_b = angles
        rotated = columns < ROTARY
        partners = rotary_partners(columns, ROTARY)
        others = _convolve_step(
            x_ptr, past_ptr, f_ptr, bias_ptr, head, sizes, partners, rotated, STEP
        )
        others = tl.where(columns < ROTARY // 2, -others, others)
        at = batch * cos_stride_b + columns
        cosines = tl.load(cos_ptr + at, mask=rotated, other=1.0).to(tl.float32)
        sines = tl.load(sin_ptr + at, mask=rotated, other=0.0).to(tl.float32)
        y = tl.where(rotated, y * cosines + others * sines, y)
    target = y_ptr + (batch * heads + head) * width + columns
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=inside)
    if f_ptr is not None:
        # If the cache is full, drop the oldest input.
        dropped = rows + 1 - next_rows
        for begin in range(0, STEP.window, STEP.lags):
            places = begin + tl.arange(0, STEP.lags)
            old = places < next_rows - 1
            mask = old[:, None] & inside[None, :]
            source = ((places + dropped) * heads + head) * past_step
            kept = tl.load(past_ptr + source[:, None] + columns[None, :], mask=mask, other=0.0)
            place = (places * heads + head) * past_step
            tl.store(next_ptr + place[:, None] + columns[None, :], kept, mask=mask)
        token = tl.load(x_ptr + head * x_step + columns, mask=inside, other=0.0)
        newest = ((next_rows - 1) * heads + head) * past_step
        tl.store(next_ptr + newest + columns, token, mask=inside)


@triton.jit
def decode_kernel(
    x, past, filters, biases, outputs, following, angles, query_heads, sizes, STEP: tl.constexpr
):
    """All heads of queries, then of keys, then of values; a branch each, as they differ.

    Args:
        x, past, filters, biases, outputs, following: pointers of q, k and v.
        sizes: heads of keys, rows of `past` and `following`, width, and strides of heads in inputs
            and states.
    """
    heads = sizes[0]
    programs = query_heads + 2 * heads
    batch = (tl.program_id(0) // programs).to(tl.int64)
    head = (tl.program_id(0) % programs).to(tl.int64)
    if head < query_heads:
        stream = (x[0], past[0], filters[0], biases[0], outputs[0], following[0])
        own = (query_heads, sizes[1], sizes[2], sizes[3], sizes[4], sizes[5])
        _decode_stream(stream, angles, batch, head, own, STEP.rotary, STEP)
    elif head < query_heads + heads:
        stream = (x[1], past[1], filters[1], biases[1], outputs[1], following[1])
        _decode_stream(stream, angles, batch, head - query_heads, sizes, STEP.rotary, STEP)
    else:
        stream = (x[2], past[2], filters[2], biases[2], outputs[2], following[2])
        head -= query_heads + heads
        _decode_stream(stream, (None, None, 0), batch, head, sizes, 0, STEP)
