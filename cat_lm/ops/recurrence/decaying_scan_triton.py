"""The scan of decaying_scan.py for fp32 on a GPU: Triton kernels that keep the state in registers.

A program has one head of one row and some columns of its state [K, V], and goes through time: the
plain torch form starts several kernels for each step instead. Sums over columns of several programs
are made afterwards, in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.runtime.triton_launch import cdiv, next_power_of_2, on_device_of

COLUMNS = 32  # the most columns of a state per program
_NUMBERS = 512  # elements of a state per warp, which take 16 registers per thread and array
# Sizes that differ from call to call: nothing is compiled anew for those that 16 divides, or 1.
VARYING = ("rows", "model_rows", "time")
_WARPS = 8  # the most warps per program; a state with many keys gets fewer columns instead


@triton.jit
def _places(key, value, keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Offsets [K or 1, V or 1] in an array with these dimensions or without, and those in it."""
    rows, columns, width = tl.zeros((1, 1), tl.int32), tl.zeros((1, 1), tl.int32), 1
    if KEYS:
        rows = key[:, None]
    if VALUES:
        columns, width = value[None, :], values
    return rows * width + columns, (rows < keys) & (columns < values)


@triton.jit
def _sum_to(x, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Sum x [K, V] over the dimensions that an array does not have."""
    if not KEYS:
        x = tl.sum(x, axis=0, keep_dims=True)
    if not VALUES:
        x = tl.sum(x, axis=1, keep_dims=True)
    return x


@triton.jit
def _size(keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Return the size of an array that may lack these dimensions."""
    size = 1
    if KEYS:
        size *= keys
    if VALUES:
        size *= values
    return size


class Scan(NamedTuple):
    """The compile-time constants of the kernels.

    Attributes:
        every: steps between the states that are kept.
        keys, columns: K, filled up to a power of two, and the columns of a state in a program.
        rate, a: which of K and V the rates have, and which of H, K and V a has.
    """

    every: int
    keys: int
    columns: int
    rate: tuple[bool, bool]
    a: tuple[bool, bool, bool]


@triton.jit
def _item(heads, values, SCAN: tl.constexpr):
    """Return this program's row, head and column chunk, and its keys and values."""
    chunks = tl.cdiv(values, SCAN.columns)
    program = tl.program_id(0)
    item, chunk = program // chunks, program % chunks
    row = (item // heads).to(tl.int64)
    value = chunk * SCAN.columns + tl.arange(0, SCAN.columns)
    return row, item % heads, chunk, tl.arange(0, SCAN.keys), value


@triton.jit
def _load_a(a_ptr, row, head, model_rows, heads, state, SCAN: tl.constexpr):
    key, value, keys, values = state
    index = row // model_rows
    if SCAN.a[0]:
        index = index * heads + head
    offsets, inside = _places(key, value, keys, values, SCAN.a[1], SCAN.a[2])
    return tl.load(a_ptr + index * _size(keys, values, SCAN.a[1], SCAN.a[2]) + offsets, inside, 0.0)


@triton.jit
def _load_step(k_ptr, v_ptr, rate_ptr, a, at, state, SCAN: tl.constexpr):
    """Load k, v, rate and decay of a step, numbered `at` over rows, steps and heads."""
    key, value, keys, values = state
    k = tl.load(k_ptr + at * keys + key, key < keys, 0.0)
    v = tl.load(v_ptr + at * values + value, value < values, 0.0)
    offsets, inside = _places(key, value, keys, values, SCAN.rate[0], SCAN.rate[1])
    size = _size(keys, values, SCAN.rate[0], SCAN.rate[1])
    rate = tl.load(rate_ptr + at * size + offsets, inside, 0.0)
    return k, v, rate, tl.exp(rate * a)


@triton.jit
def _next(state, decay, k, v, inside):
    """Return the state after a step; entries outside the state stay 0, even next to infinities."""
    return tl.where(inside, decay * state + k[:, None] * v[None, :], 0.0)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(inputs, results, model_rows, time, shape, SCAN: tl.constexpr):
    """Outputs, the last state, and that before every every-th step.

    Args:
        inputs: pointers of q, k, v, rate, a and the first state.
        results: pointers to the tensors to fill.
        shape: heads, keys, values.
    """
    q_ptr, k_ptr, v_ptr, rate_ptr, a_ptr, initial_ptr = inputs
    out_ptr, last_ptr, kept_ptr = results
    heads, keys, values = shape
    row, head, _, key, value = _item(heads, values, SCAN)
    held = (key, value, keys, values)
    a = _load_a(a_ptr, row, head, model_rows, heads, held, SCAN)
    state_at, inside = _places(key, value, keys, values, True, True)
    blocks = tl.cdiv(time, SCAN.every)
    ends_at = (row * heads + head) * keys * values + state_at
    state = tl.load(initial_ptr + ends_at, inside, 0.0)
    for t in range(time):
        if t % SCAN.every == 0:
            block = (row * blocks + t // SCAN.every) * heads + head
            tl.store(kept_ptr + block * keys * values + state_at, state, inside)
        at = (row * time + t) * heads + head
        k, v, _rate, decay = _load_step(k_ptr, v_ptr, rate_ptr, a, at, held, SCAN)
        state = _next(state, decay, k, v, inside)
        q = tl.load(q_ptr + at * keys + key, key < keys, 0.0)
        out = tl.sum(q[:, None] * state, axis=0)
        tl.store(out_ptr + at * values + value, out, value < values)
    tl.store(last_ptr + ends_at, state, inside)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    inputs,
    kept_ptr,
    upstream,
    states_ptr,
    results,
    rows,
    model_rows,
    time,
    shape,
    SCAN: tl.constexpr,
):
    """Gradients; those summed over columns are this program's part of them.

    The states of a block are made again, into this program's memory at `states_ptr`.

    Args:
        inputs: pointers of q, k, v, rate and a.
        upstream: pointers to the gradients of the outputs and the last state.
        results: pointers to the gradients of inputs and the first state.
        shape: as in `forward_kernel`.
    """
    q_ptr, k_ptr, v_ptr, rate_ptr, a_ptr = inputs
    grad_ptr, grad_last_ptr = upstream
    dq_ptr, dk_ptr, dv_ptr, drate_ptr, da_ptr, dinitial_ptr = results
    heads, keys, values = shape
    row, head, chunk, key, value = _item(heads, values, SCAN)
    held = (key, value, keys, values)
    a = _load_a(a_ptr, row, head, model_rows, heads, held, SCAN)
    state_at, inside = _places(key, value, keys, values, True, True)
    blocks = tl.cdiv(time, SCAN.every)
    parts = chunk.to(tl.int64) * rows  # rows of the chunks before this one
    scratch_ptr = states_ptr + tl.program_id(0).to(tl.int64) * SCAN.every * SCAN.keys * SCAN.columns
    scratch_ptr += (
        tl.arange(0, SCAN.keys)[:, None] * SCAN.columns + tl.arange(0, SCAN.columns)[None, :]
    )
    ends_at = (row * heads + head) * keys * values + state_at
    flow = tl.load(grad_last_ptr + ends_at, inside, 0.0)  # ∂/∂S_t
    da = tl.zeros_like(a)
    for step in range(blocks):
        start = (blocks - 1 - step) * SCAN.every
        count = tl.minimum(SCAN.every, time - start)
        kept = ((row * blocks + start // SCAN.every) * heads + head) * keys * values
        state = tl.load(kept_ptr + kept + state_at, inside, 0.0)
        tl.debug_barrier()  # Overwrite the last block's states only after all threads read them.
        for i in range(count):
            tl.store(scratch_ptr + i * SCAN.keys * SCAN.columns, state)
            at = (row * time + start + i) * heads + head
            k, v, _rate, decay = _load_step(k_ptr, v_ptr, rate_ptr, a, at, held, SCAN)
            state = _next(state, decay, k, v, inside)
        tl.debug_barrier()
        for j in range(count):
            i = count - 1 - j
            at = (row * time + start + i) * heads + head
            k, v, rate, decay = _load_step(k_ptr, v_ptr, rate_ptr, a, at, held, SCAN)
            q = tl.load(q_ptr + at * keys + key, key < keys, 0.0)
            grad = tl.load(grad_ptr + at * values + value, value < values, 0.0)
            flow = tl.where(inside, flow + q[:, None] * grad[None, :], 0.0)
            place = (parts * time * heads + at) * keys + key
            tl.store(dq_ptr + place, tl.sum(state * grad[None, :], axis=1), key < keys)
            tl.store(dk_ptr + place, tl.sum(flow * v[None, :], axis=1), key < keys)
            dv = tl.sum(flow * k[:, None], axis=0)
            tl.store(dv_ptr + at * values + value, dv, value < values)
            state = tl.load(scratch_ptr + i * SCAN.keys * SCAN.columns)
            flow = tl.where(inside, flow * decay, 0.0)
            exponent = flow * state  # ∂/∂(r_t ⊙ a)
            da += _sum_to(exponent * rate, SCAN.a[1], SCAN.a[2])
            drate = _sum_to(exponent * a, SCAN.rate[0], SCAN.rate[1])
            rate_at, there = _places(key, value, keys, values, SCAN.rate[0], SCAN.rate[1])
            place = parts * (not SCAN.rate[1]) * time * heads + at
            place = place * _size(keys, values, SCAN.rate[0], SCAN.rate[1]) + rate_at
            tl.store(drate_ptr + place, drate, there)
    tl.store(dinitial_ptr + ends_at, flow, inside)
    a_at, there = _places(key, value, keys, values, SCAN.a[1], SCAN.a[2])
    place = ((parts * (not SCAN.a[2]) + row) * heads + head) * _size(
        keys, values, SCAN.a[1], SCAN.a[2]
    )
    tl.store(da_ptr + place + a_at, da, there)


def _launch(
    every: int, q: Tensor, v: Tensor, rate: Tensor, a: Tensor
) -> tuple[int, dict[str, Any]]:
    """Choose the column chunks, compile-time arguments and compiler options of a kernel."""
    heads, keys = q.shape[3:]
    values = v.shape[-1]
    padded = next_power_of_2(keys)
    columns = min(COLUMNS, next_power_of_2(values), max(1, _WARPS * _NUMBERS // padded))
    rate_has, a_has = (tuple(n > 1 for n in sizes) for sizes in (rate.shape[-2:], a.shape[-3:]))
    scan = Scan(every, padded, columns, rate_has, a_has)
    options = {"SCAN": scan, "num_warps": min(_WARPS, max(1, padded * columns // _NUMBERS))}
    return cdiv(values, columns), {"shape": (heads, keys, values)} | options


def forward(every: int, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute as `decaying_scan_torch.forward`."""
    q, _, v, rate, a, initial = inputs = tuple(s.contiguous() for s in inputs)
    chunks, options = _launch(every, q, v, rate, a)
    models, batch, time, heads, keys = q.shape
    out, last = torch.empty_like(v), torch.empty_like(initial)
    kept = q.new_empty(models, batch, cdiv(time, every), heads, keys, v.shape[-1])
    with on_device_of(q):
        forward_kernel[(models * batch * heads * chunks,)](
            inputs=inputs, results=(out, last, kept), model_rows=batch, time=time, **options
        )
    return out, last, kept


def backward(
    every: int, kept: Tensor, grad: Tensor, grad_last: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Compute as `decaying_scan_torch.backward`."""
    q, k, v, rate, a = inputs = tuple(s.contiguous() for s in inputs)
    upstream = grad.contiguous(), grad_last.contiguous()
    chunks, options = _launch(every, q, v, rate, a)
    models, batch, time, heads, _ = q.shape
    programs = models * batch * heads * chunks
    scan = options["SCAN"]
    states = q.new_empty(programs, every, scan.keys, scan.columns)
    dq, dk = (s.new_empty(chunks, *s.shape) for s in (q, k))
    dv, dinitial = torch.empty_like(v), torch.empty_like(upstream[1])
    drate = rate.new_empty(1 if scan.rate[1] else chunks, *rate.shape)
    a_sizes = (models, batch, heads, *a.shape[-2:])
    da = a.new_empty(1 if scan.a[2] else chunks, *a_sizes)
    with on_device_of(q):
        backward_kernel[(programs,)](
            inputs=inputs,
            kept_ptr=kept.contiguous(),
            upstream=upstream,
            states_ptr=states,
            results=(dq, dk, dv, drate, da, dinitial),
            rows=models * batch,
            model_rows=batch,
            time=time,
            **options,
        )
    dq, dk, drate = (s[0] if len(s) == 1 else s.sum(0) for s in (dq, dk, drate))
    return dq, dk, dv, drate, da.sum((0, 2)).sum_to_size(a.shape), dinitial
