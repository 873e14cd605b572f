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
    pointers,
    strides,
    unit_stride,
)

COLUMNS = 32  # channels of a head that a program has at most: more do not fit its registers
MOST_STATE = 64  # numbers of state; more do not fit beside the taps
_LEAST = 16  # of every side of a matrix product
# Sizes that differ from call to call: nothing is compiled anew for those that 16 divides, or 1.
VARYING = ("time", "length")


@triton.jit
def _load(matrix_ptr, rows, columns, row, column):
    """A matrix [rows, columns] with zeros beyond."""
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
def _borders(positions_ptr, row, start, time, length, step):
    """As `chunks.borders` of the chunk at `start`: what may be read, kept and carried on."""
    position = tl.load(positions_ptr + row * time + start + step, start + step < time, 0)
    at_end = start + length - 1
    # Beyond the row's end nothing is read, so that what is carried there is nobody's.
    last = tl.load(positions_ptr + row * time + at_end, at_end < time, 0)
    taps = (step[:, None] - step[None, :]) <= position[:, None]
    return taps, position > step, (length - 1 - step) <= last, last >= length


class Sides(NamedTuple):
    """What the kernels are compiled for: L, K and channels, as powers of 2, and products."""

    block: int
    state: int
    columns: int
    precision: str


@triton.jit
def _matrices(chunk, head, length, state, SIDES: tl.constexpr):
    """The four matrices of a head, see chunks.py."""
    taps_ptr, read_ptr, write_ptr, carry_ptr = chunk
    step, number = tl.arange(0, SIDES.block), tl.arange(0, SIDES.state)
    taps = _load(taps_ptr + head * length * length, length, length, step, step)
    read = _load(read_ptr + head * length * state, length, state, step, number)
    write = _load(write_ptr + head * state * length, state, length, number, step)
    carry = _load(carry_ptr + head * state * state, state, state, number, number)
    return taps, read, write, carry


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x_ptr,
    taps_ptr,
    read_ptr,
    write_ptr,
    carry_ptr,
    positions_ptr,
    initial_ptr,
    y_ptr,
    last_ptr,
    kept_ptr,
    time,
    length,
    heads,
    state,
    width,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    SIDES: tl.constexpr,
):
    """Outputs, the last state, and that before every chunk."""
    PRECISION: tl.constexpr = SIDES.precision
    column = tl.program_id(1) * SIDES.columns + tl.arange(0, SIDES.columns)
    item = tl.program_id(0)
    row, head = (item // heads).to(tl.int64), item % heads
    step, number = tl.arange(0, SIDES.block), tl.arange(0, SIDES.state)
    matrices = (taps_ptr, read_ptr, write_ptr, carry_ptr)
    taps, read, write, carry = _matrices(matrices, head, length, state, SIDES)
    ends_at = (row * heads + head) * state * width
    held = _load(initial_ptr + ends_at, state, width, number, column)
    chunks = tl.cdiv(time, length)
    for chunk in range(chunks):
        kept = ((row * chunks + chunk) * heads + head) * state * width
        _store(kept_ptr + kept, state, width, number, column, held)
        start = chunk * length
        inside = ((step < length) & (start + step < time))[:, None] & (column < width)[None, :]
        at = x_ptr + row * x_stride_b + (start + step)[:, None].to(tl.int64) * x_stride_t
        x = tl.load(at + head * x_stride_h + column[None, :], inside, 0.0).to(tl.float32)
        if positions_ptr is None:
            y = _dot(taps, x, PRECISION) + _dot(read, held, PRECISION)
            held = _dot(carry, held, PRECISION) + _dot(write, x, PRECISION)
        else:
            near, before, after, on = _borders(positions_ptr, row, start, time, length, step)
            y = _dot(tl.where(near, taps, 0.0), x, PRECISION)
            y += tl.where(before[:, None], _dot(read, held, PRECISION), 0.0)
            passed = tl.where(on, _dot(carry, held, PRECISION), 0.0)
            held = passed + _dot(tl.where(after[None, :], write, 0.0), x, PRECISION)
        to = y_ptr + ((row * time + start + step)[:, None] * heads + head) * width + column[None, :]
        tl.store(to, y.to(y_ptr.dtype.element_ty), inside)
    _store(last_ptr + ends_at, state, width, number, column, held)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dy_ptr,
    dlast_ptr,
    x_ptr,
    taps_ptr,
    read_ptr,
    write_ptr,
    carry_ptr,
    positions_ptr,
    kept_ptr,
    dx_ptr,
    dtaps_ptr,
    dread_ptr,
    dwrite_ptr,
    dcarry_ptr,
    dinitial_ptr,
    time,
    length,
    heads,
    state,
    width,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    dy_stride_b,
    dy_stride_t,
    dy_stride_h,
    SIDES: tl.constexpr,
):
    """Gradients; those of the matrices are this program's part of them."""
    PRECISION: tl.constexpr = SIDES.precision
    column = tl.program_id(1) * SIDES.columns + tl.arange(0, SIDES.columns)
    item = tl.program_id(0)
    row, head = (item // heads).to(tl.int64), item % heads
    step, number = tl.arange(0, SIDES.block), tl.arange(0, SIDES.state)
    matrices = (taps_ptr, read_ptr, write_ptr, carry_ptr)
    taps, read, write, carry = _matrices(matrices, head, length, state, SIDES)
    ends_at = (row * heads + head) * state * width
    flow = _load(dlast_ptr + ends_at, state, width, number, column)  # of the state after a chunk
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
        at = x_ptr + row * x_stride_b + place * x_stride_t + head * x_stride_h
        x = tl.load(at + column[None, :], inside, 0.0).to(tl.float32)
        at = dy_ptr + row * dy_stride_b + place * dy_stride_t + head * dy_stride_h
        dy = tl.load(at + column[None, :], inside, 0.0).to(tl.float32)
        if positions_ptr is None:
            dx = _dot(taps.T, dy, PRECISION) + _dot(write.T, flow, PRECISION)
            dtaps += _dot(dy, x.T, PRECISION)
            dread += _dot(dy, held.T, PRECISION)
            dwrite += _dot(flow, x.T, PRECISION)
            dcarry += _dot(flow, held.T, PRECISION)
            flow = _dot(read.T, dy, PRECISION) + _dot(carry.T, flow, PRECISION)
        else:
            near, before, after, on = _borders(positions_ptr, row, start, time, length, step)
            reading = tl.where(before[:, None], dy, 0.0)
            dx = _dot(tl.where(near, taps, 0.0).T, dy, PRECISION)
            dx += tl.where(after[:, None], _dot(write.T, flow, PRECISION), 0.0)
            dtaps += tl.where(near, _dot(dy, x.T, PRECISION), 0.0)
            dread += _dot(reading, held.T, PRECISION)
            dwrite += tl.where(after[None, :], _dot(flow, x.T, PRECISION), 0.0)
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
    sides = Sides(*sides, precision="ieee" if hip else "tf32x3")
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
            **_given(x, chunk, positions),
            **pointers(initial=initial.contiguous(), y=y, last=last, kept=kept),
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
            **_given(x, chunk, positions),
            **pointers(dy=dy, dlast=dlast.contiguous(), kept=kept.contiguous()),
            **pointers(dx=dx, dinitial=dinitial),
            **{f"d{name}_ptr": p for name, p in zip(Chunk._fields, parts, strict=True)},
            **strides("dy", dy, "bth"),
            **compiled,
        )
    return dx, Chunk(*(part.sum((0, 2)) for part in parts)), dinitial


def _given(x: Tensor, chunk: Chunk, positions: Tensor | None) -> dict[str, Any]:
    """Return what both kernels take."""
    length, state = chunk.read.shape[1:]
    given = {"time": x.shape[1], "length": length, "heads": x.shape[2]}
    given |= {"state": state, "width": x.shape[3]} | strides("x", x, "bth")
    given |= pointers(x=x, positions=contiguous(positions))
    return given | pointers(
        **{name: matrix.contiguous() for name, matrix in chunk._asdict().items()}
    )
