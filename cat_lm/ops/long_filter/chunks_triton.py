"""The chunks of chunks.py on a GPU: Triton kernels that keep a head's state in registers.

A program has one head of one row and some of its channels, and goes from chunk to chunk. Products
are of fp32 numbers, of three parts each in TF32 where there is that; sums and states are in fp32.
Sums over rows and channels are made afterwards, in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.long_filter.chunks import Chunk
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    next_power_of_2,
    on_device_of,
    unit_stride,
)

COLUMNS = 32  # the most channels of a head per program, limited by registers
MOST_STATE = 64  # the largest state size that fits into registers together with the taps
_LEAST = 16  # the smallest side of a matrix product
# Sizes that differ from call to call: nothing is compiled anew for those that 16 divides, or 1.
VARYING = ("time", "length")


@triton.jit
def _load(matrix_ptr, rows, columns, row, column):
    """Load a matrix [rows, columns], with zeros beyond it."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(matrix_ptr + row[:, None] * columns + column[None, :], inside, 0.0)


@triton.jit
def _store(matrix_ptr, rows, columns, row, column, value):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(matrix_ptr + row[:, None] * columns + column[None, :], value, inside)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _document_factors(positions_ptr, row, start, time, length, step):
    """Return `chunks.document_factors` of the chunk at `start`: read, kept and carried on."""
    position = tl.load(positions_ptr + row * time + start + step, start + step < time, 0)
    at_end = start + length - 1
    # Beyond the row's end nothing is read, so that what is carried there is nobody's.
    last = tl.load(positions_ptr + row * time + at_end, at_end < time, 0)
    taps = (step[:, None] - step[None, :]) <= position[:, None]
    return taps, position > step, (length - 1 - step) <= last, last >= length


class Constants(NamedTuple):
    """Compile-time constants: L, K and channels as powers of 2, and products."""

    block: int
    state: int
    columns: int
    precision: str


@triton.jit
def _load_matrices(chunk, head, length, state, SIDES: tl.constexpr):
    """Load the four matrices of a head, see chunks.py."""
    taps_ptr, read_ptr, write_ptr, carry_ptr = chunk
    step, number = tl.arange(0, SIDES.block), tl.arange(0, SIDES.state)
    taps = _load(taps_ptr + head * length * length, length, length, step, step)
    read = _load(read_ptr + head * length * state, length, state, step, number)
    write = _load(write_ptr + head * state * length, state, length, number, step)
    carry = _load(carry_ptr + head * state * state, state, state, number, number)
    return taps, read, write, carry


@triton.jit
def _load_rows(x, row, head, place, inside, column):
    """Load a head's channels at some places of a row, in fp32."""
    x_ptr, stride_b, stride_t, stride_h = x
    at = x_ptr + row * stride_b + place * stride_t + head * stride_h
    return tl.load(at + column[None, :], inside, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x, matrices, positions_ptr, initial_ptr, results, time, length, shape, SIDES: tl.constexpr
):
    """Outputs, the last state, and that before every chunk.

    Args:
        x: a pointer, and the strides of rows, steps and heads.
        matrices: pointers of a chunk's.
        results: pointers to the tensors to fill.
        shape: heads, state, width.
    """
    y_ptr, last_ptr, kept_ptr = results
    heads, state, width = shape
    PRECISION: tl.constexpr = SIDES.precision
    column = tl.program_id(1) * SIDES.columns + tl.arange(0, SIDES.columns)
    item = tl.program_id(0)
    row, head = (item // heads).to(tl.int64), item % heads
    step, number = tl.arange(0, SIDES.block), tl.arange(0, SIDES.state)
    taps, read, write, carry = _load_matrices(matrices, head, length, state, SIDES)
    ends_at = (row * heads + head) * state * width
    held = _load(initial_ptr + ends_at, state, width, number, column)
    chunks = tl.cdiv(time, length)
    for chunk in range(chunks):
        kept = ((row * chunks + chunk) * heads + head) * state * width
        _store(kept_ptr + kept, state, width, number, column, held)
        start = chunk * length
        inside = ((step < length) & (start + step < time))[:, None] & (column < width)[None, :]
        place = (start + step)[:, None].to(tl.int64)
        inputs = _load_rows(x, row, head, place, inside, column)
        if positions_ptr is None:
            y = _dot(taps, inputs, PRECISION) + _dot(read, held, PRECISION)
            held = _dot(carry, held, PRECISION) + _dot(write, inputs, PRECISION)
        else:
            near, before, after, on = _document_factors(
                positions_ptr, row, start, time, length, step
            )
            y = _dot(tl.where(near, taps, 0.0), inputs, PRECISION)
            y += tl.where(before[:, None], _dot(read, held, PRECISION), 0.0)
            passed = tl.where(on, _dot(carry, held, PRECISION), 0.0)
            held = passed + _dot(tl.where(after[None, :], write, 0.0), inputs, PRECISION)
        to = y_ptr + ((row * time + place) * heads + head) * width + column[None, :]
        tl.store(to, y.to(y_ptr.dtype.element_ty), inside)
    _store(last_ptr + ends_at, state, width, number, column, held)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dy,
    dlast_ptr,
    x,
    matrices,
    positions_ptr,
    kept_ptr,
    results,
    time,
    length,
    shape,
    SIDES: tl.constexpr,
):
    """Gradients, `results`; those of the matrices are this program's part of them."""
    dx_ptr, dtaps_ptr, dread_ptr, dwrite_ptr, dcarry_ptr, dinitial_ptr = results
    heads, state, width = shape
    PRECISION: tl.constexpr = SIDES.precision
    column = tl.program_id(1) * SIDES.columns + tl.arange(0, SIDES.columns)
    item = tl.program_id(0)
    row, head = (item // heads).to(tl.int64), item % heads
    step, number = tl.arange(0, SIDES.block), tl.arange(0, SIDES.state)
    taps, read, write, carry = _load_matrices(matrices, head, length, state, SIDES)
    ends_at = (row * heads + head) * state * width
    # The gradient of the state after a chunk.
    flow = _load(dlast_ptr + ends_at, state, width, number, column)
    dtaps, dread = tl.zeros_like(taps), tl.zeros_like(read)
    dwrite, dcarry = tl.zeros_like(write), tl.zeros_like(carry)
    chunks = tl.cdiv(time, length)
    for left in range(chunks):
        chunk = chunks - 1 - left
        start = chunk * length
        kept = ((row * chunks + chunk) * heads + head) * state * width
        held = _load(kept_ptr + kept, state, width, number, column)
        inside = ((step < length) & (start + step < time))[:, None] & (column < width)[None, :]
        place = (start + step)[:, None].to(tl.int64)
        inputs = _load_rows(x, row, head, place, inside, column)
        grads = _load_rows(dy, row, head, place, inside, column)
        if positions_ptr is None:
            dx = _dot(taps.T, grads, PRECISION) + _dot(write.T, flow, PRECISION)
            dtaps += _dot(grads, inputs.T, PRECISION)
            dread += _dot(grads, held.T, PRECISION)
            dwrite += _dot(flow, inputs.T, PRECISION)
            dcarry += _dot(flow, held.T, PRECISION)
            flow = _dot(read.T, grads, PRECISION) + _dot(carry.T, flow, PRECISION)
        else:
            near, before, after, on = _document_factors(
                positions_ptr, row, start, time, length, step
            )
            reading = tl.where(before[:, None], grads, 0.0)
            dx = _dot(tl.where(near, taps, 0.0).T, grads, PRECISION)
            dx += tl.where(after[:, None], _dot(write.T, flow, PRECISION), 0.0)
            dtaps += tl.where(near, _dot(grads, inputs.T, PRECISION), 0.0)
            dread += _dot(reading, held.T, PRECISION)
            dwrite += tl.where(after[None, :], _dot(flow, inputs.T, PRECISION), 0.0)
            passed = tl.where(on, flow, 0.0)
            dcarry += _dot(passed, held.T, PRECISION)
            flow = _dot(read.T, reading, PRECISION) + _dot(carry.T, passed, PRECISION)
        to = dx_ptr + ((row * time + place) * heads + head) * width + column[None, :]
        tl.store(to, dx.to(dx_ptr.dtype.element_ty), inside)
    _store(dinitial_ptr + ends_at, state, width, number, column, flow)
    part = item * tl.num_programs(1) + tl.program_id(1)
    _store(dtaps_ptr + part * length * length, length, length, step, step, dtaps)
    _store(dread_ptr + part * length * state, length, state, step, number, dread)
    _store(dwrite_ptr + part * state * length, state, length, number, step, dwrite)
    _store(dcarry_ptr + part * state * state, state, state, number, number, dcarry)


def options(length: int, state: int, width: int, hip: bool) -> dict[str, Any]:
    """Return what a kernel is compiled for, and how; `hip` for AMD's GPUs."""
    sizes = (length, state, min(width, COLUMNS))
    sides = (max(_LEAST, next_power_of_2(size)) for size in sizes)
    sides = Constants(*sides, precision="ieee" if hip else "tf32x3")
    return {"SIDES": sides, "num_warps": 8 if sides.block > 32 else 4, "num_stages": 1}


def forward(
    x: Tensor, chunk: Chunk, positions: Tensor | None, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `chunks.forward` does."""
    batch, time, heads, width = x.shape
    length, state = chunk.read.shape[1:]
    x, y, last = unit_stride(x), x.new_empty(x.shape), torch.empty_like(initial)
    kept = initial.new_empty(batch, cdiv(time, length), heads, state, width)
    compiled = options(length, state, width, torch.version.hip is not None)
    with on_device_of(x):
        forward_kernel[(batch * heads, cdiv(width, compiled["SIDES"].columns))](
            initial_ptr=initial.contiguous(),
            results=(y, last, kept),
            **_kernel_arguments(x, chunk, positions),
            **compiled,
        )
    return y, last, kept


def backward(
    dy: Tensor, dlast: Tensor, x: Tensor, chunk: Chunk, positions: Tensor | None, kept: Tensor
) -> tuple[Tensor, Chunk, Tensor]:
    """Compute what `chunks.backward` does."""
    batch, _, heads, width = x.shape
    length, state = chunk.read.shape[1:]
    x, dy = unit_stride(x), unit_stride(dy)
    dx, dinitial = x.new_empty(x.shape), dlast.new_empty(dlast.shape)
    compiled = options(length, state, width, torch.version.hip is not None)
    columns = cdiv(width, compiled["SIDES"].columns)
    parts = [m.new_empty(batch, heads, columns, *m.shape[1:]) for m in chunk]
    with on_device_of(x):
        backward_kernel[(batch * heads, columns)](
            dy=(dy, *dy.stride()[:3]),
            dlast_ptr=dlast.contiguous(),
            kept_ptr=kept.contiguous(),
            results=(dx, *parts, dinitial),
            **_kernel_arguments(x, chunk, positions),
            **compiled,
        )
    return dx, Chunk(*(part.sum((0, 2)) for part in parts)), dinitial


def _kernel_arguments(x: Tensor, chunk: Chunk, positions: Tensor | None) -> dict[str, Any]:
    """Return the arguments that both kernels take."""
    length, state = chunk.read.shape[1:]
    return {
        "x": (x, *x.stride()[:3]),
        "matrices": tuple(matrix.contiguous() for matrix in chunk),
        "positions_ptr": contiguous(positions),
        "time": x.shape[1],
        "length": length,
        "shape": (x.shape[2], state, x.shape[3]),
    }
