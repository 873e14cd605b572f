"""Attention to chosen and local blocks, each by itself, and their sum: Triton kernels.

What a query gets of each of its segments (see `segments`), o_s with the logarithm of its weight
l_s, waits in a place of its own:

    y = sum_s w_s o_s,     w = softmax(l),

Backward, with δ_s = w_s dy·y and p the softmax within a segment:

    dv = w p dy,     d(q·k) = p (w dy·v − δ),

a block's keys by one program, in the order of the tiles: no atomics, the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.convolution.triton.tiles import UPCAST
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.segments import Tiles, segments_of, sides, tile_segments
from cat_lm.ops.runtime.fake import is_fake
from cat_lm.ops.runtime.operators import refuse_second_derivative
from cat_lm.ops.runtime.triton_launch import on_device_of, pointers, strides, unit_stride

# Sizes that differ from call to call: nothing is compiled anew for those that 16 divides, or 1.
VARYING = ("time", "keys", "segments")


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _queries(pairs_ptr, lengths_ptr, tile, group, time, segments, TILE: tl.constexpr):
    """A tile's queries, the keys that they see, and where their segments stand in a head."""
    pair = tl.load(pairs_ptr + tile * TILE + tl.arange(0, TILE))
    there = pair >= 0
    length = tl.load(lengths_ptr + pair, there, 0)
    within = tl.where(there, pair - group * time * segments, 0)
    return there, length, within // segments, within


@triton.jit
def _rows(x_ptr, row, inside, column, width, stride):
    """Rows of a matrix, zeros where there is none."""
    at = x_ptr + row[:, None] * stride + column[None, :]
    return tl.load(at, inside[:, None] & (column < width)[None, :], 0.0)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,
    logs_ptr,
    pairs_ptr,
    lengths_ptr,
    codes_ptr,
    scaling,
    time,
    keys,
    segments,
    heads,
    shared,
    groups,
    width,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a tile's queries of one head get of a block of keys, and the logarithms of weights."""
    tile = tl.program_id(0).to(tl.int64)
    code = tl.load(codes_ptr + tile)
    group, start = code // keys, code % keys
    row = group // groups
    head = (group % groups) * (heads // groups) + tl.program_id(1)
    source = head // (heads // shared)
    there, length, place, within = _queries(
        pairs_ptr, lengths_ptr, tile, group, time, segments, TILE
    )
    column, inner = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    slot, inside = start + inner, start + inner < keys
    q_ptr += row * q_stride_b + head * q_stride_h
    q = _rows(q_ptr, place, there, column, width, q_stride_t)
    k_ptr += row * k_stride_b + source * k_stride_h
    k = _rows(k_ptr, slot, inside, column, width, k_stride_t)
    v_ptr += row * v_stride_b + source * v_stride_h
    v = _rows(v_ptr, slot, inside, column, width, v_stride_t)
    logits = _dot(q, tl.trans(k), PRECISION) * scaling
    logits = tl.where(inner[None, :] < length[:, None], logits, -float("inf"))
    highest = tl.where(there, tl.max(logits, axis=1), 0.0)
    weights = tl.exp(logits - highest[:, None])
    total = tl.where(there, tl.sum(weights, axis=1), 1.0)
    part = _dot((weights / total[:, None]).to(v.dtype), v, PRECISION)
    at = (row * heads + head) * time * segments + within
    tl.store(logs_ptr + at, highest + tl.log(total), there)
    to = parts_ptr + at[:, None] * width + column[None, :]
    seen = there[:, None] & (column < width)[None, :]
    tl.store(to, part.to(parts_ptr.dtype.element_ty), seen)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    weights_ptr,
    logs_ptr,
    deltas_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    pairs_ptr,
    lengths_ptr,
    codes_ptr,
    firsts_ptr,
    counts_ptr,
    extents_ptr,
    scaling,
    time,
    keys,
    segments,
    heads,
    shared,
    groups,
    width,
    dy_stride_b,
    dy_stride_h,
    dy_stride_t,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a block's keys and values, and the queries' parts, by all tiles that met it."""
    run = tl.program_id(0).to(tl.int64)
    first, count = tl.load(firsts_ptr + run), tl.load(counts_ptr + run)
    code, extent = tl.load(codes_ptr + first), tl.load(extents_ptr + run)
    group, start = code // keys, code % keys
    row = group // groups
    source = (group % groups) * (shared // groups) + tl.program_id(1)
    column, inner = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    slot, inside = start + inner, start + inner < keys
    k_ptr += row * k_stride_b + source * k_stride_h
    k = _rows(k_ptr, slot, inside, column, width, k_stride_t)
    v_ptr += row * v_stride_b + source * v_stride_h
    v = _rows(v_ptr, slot, inside, column, width, v_stride_t)
    dk = tl.zeros((BLOCK, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK, WIDTH), tl.float32)
    each = heads // shared
    for member in range(each):
        head = source * each + member
        for step in range(count):
            there, length, place, within = _queries(
                pairs_ptr, lengths_ptr, first + step, group, time, segments, TILE
            )
            at = (row * heads + head) * time * segments + within
            weight = tl.load(weights_ptr + at, there, 0.0)
            log = tl.load(logs_ptr + at, there, 0.0)
            delta = tl.load(deltas_ptr + at, there, 0.0)
            of_head = q_ptr + row * q_stride_b + head * q_stride_h
            q = _rows(of_head, place, there, column, width, q_stride_t)
            of_head = dy_ptr + row * dy_stride_b + head * dy_stride_h
            dy = _rows(of_head, place, there, column, width, dy_stride_t)
            logits = _dot(q, tl.trans(k), PRECISION) * scaling
            seen = inner[None, :] < length[:, None]
            inner_weights = tl.where(seen, tl.exp(logits - log[:, None]), 0.0)
            shares = (inner_weights * weight[:, None]).to(dy.dtype)
            dv += _dot(tl.trans(shares), dy, PRECISION)
            of_shares = _dot(dy, tl.trans(v), PRECISION)
            dlogits = inner_weights * (of_shares * weight[:, None] - delta[:, None]) * scaling
            dlogits = dlogits.to(q.dtype)
            dk += _dot(tl.trans(dlogits), q, PRECISION)
            dq = _dot(dlogits, k, PRECISION)
            to = dq_ptr + at[:, None] * width + column[None, :]
            tl.store(to, dq, there[:, None] & (column < width)[None, :])
    kept = (inner < extent)[:, None] & (column < width)[None, :]
    at = ((row * shared + source) * keys + slot)[:, None] * width + column[None, :]
    tl.store(dk_ptr + at, dk, kept)
    tl.store(dv_ptr + at, dv, kept)


def options(block: int, width: int, dtype: torch.dtype, backward: bool) -> dict[str, int | str]:
    """Return a kernel's compile-time constants: tiles whose sums fit into registers.

    Tiles of 64 queries are of asynchronous products on Hopper. Where the gradients' are many, ptxas
    restores matrix descriptors while products are under way (tests/unit/test_ops_triton_sass.py),
    and in fp32, in which each is three, spills up to 2 KB of a thread: tiles are smaller there.
    """
    keys, columns = sides(block, width)
    is_large = keys * columns * dtype.itemsize >= 2**14
    tile = 16 if dtype == torch.float32 else 64 if columns <= keys <= 64 else 32
    found = {"BLOCK": keys, "WIDTH": columns, "TILE": tile}
    found["PRECISION"] = "ieee" if torch.version.hip is not None else "tf32x3"
    return found | {"num_warps": 8 if is_large or backward else 4, "num_stages": 1}


def forward(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, block: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend with [B, H, T, D] to each segment by itself.

    Returns:
        [B, H, T, M, D], and the logarithms of the weights in fp32 [B, H, T, M]; zeros and −inf
        where there is no segment.
    """
    batch, heads, time, width = query.shape
    query, key, value = (unit_stride(x) for x in (query, key, value))
    segments = tiles.lengths.shape[3]
    parts = query.new_zeros(batch, heads, time, segments, width)
    logs = torch.full(parts.shape[:4], -torch.inf, device=query.device)
    if is_fake(query):
        return parts, logs
    with on_device_of(query):
        forward_kernel[(tiles.codes.shape[0], heads // tiles.lengths.shape[1])](
            **_given(query, key, value, tiles),
            **pointers(parts=parts, logs=logs),
            scaling=scaling,
            **options(block, width, query.dtype, False),
        )
    return parts, logs


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    logs: Tensor,
    deltas: Tensor,
    tiles: Tiles,
    block: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, of that of the output [B, H, T, D].

    Args:
        weights, logs, deltas: fp32 [B, H, T, M]; see `cat_lm.ops.landmark.segments`.
    """
    gradient, query, key, value = (unit_stride(x) for x in (gradient, query, key, value))
    of_parts = logs.new_zeros(*logs.shape, query.shape[3])
    of_keys, of_values = (torch.zeros(key.shape, device=key.device) for _ in range(2))
    with on_device_of(query):
        backward_kernel[(tiles.counts.shape[0], key.shape[1] // tiles.lengths.shape[1])](
            **_given(query, key, value, tiles),
            **pointers(firsts=tiles.firsts, counts=tiles.counts, extents=tiles.extents),
            **pointers(weights=weights.contiguous(), logs=logs, deltas=deltas.contiguous()),
            **pointers(dy=gradient, dq=of_parts, dk=of_keys, dv=of_values),
            **strides("dy", gradient, "bht"),
            scaling=scaling,
            **options(block, query.shape[3], query.dtype, True),
        )
    found = (of_parts.sum(dim=3), of_keys, of_values)
    return tuple(x.to(query.dtype) for x in found)


def _given(query: Tensor, key: Tensor, value: Tensor, tiles: Tiles) -> dict[str, Any]:
    """Return what both kernels take."""
    given = {"time": query.shape[2], "keys": key.shape[2], "segments": tiles.lengths.shape[3]}
    given |= {"heads": query.shape[1], "shared": key.shape[1]}
    given |= {"groups": tiles.lengths.shape[1], "width": query.shape[3]}
    given |= pointers(pairs=tiles.pairs, lengths=tiles.lengths, codes=tiles.codes)
    given |= pointers(q=query, k=key, v=value)
    return (
        given | strides("q", query, "bht") | strides("k", key, "bht") | strides("v", value, "bht")
    )


@torch.compiler.disable
def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
) -> Tensor:
    """Attend as `cat_lm.ops.landmark.attend.attend_gathered`, where `why_not` returns None."""
    firsts, lengths = segments_of(selected, layout, local)
    tile = options(layout.block, query.shape[3], query.dtype, False)["TILE"]
    tiles = tile_segments(firsts, lengths, key.shape[2], tile)
    return SegmentAttention.apply(query, key, value, tiles, layout.block, scaling)


class SegmentAttention(torch.autograd.Function):
    """Attention by segments; gradients of queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, tiles, block, scaling = given
        parts, logs = forward(*given)
        weights = logs.softmax(dim=3)
        output = (weights.to(parts.dtype)[..., None, :] @ parts).squeeze(3)
        ctx.save_for_backward(query, key, value, weights, logs, output, *vars(tiles).values())
        ctx.block, ctx.scaling = block, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("landmark attention by its Triton kernel")
        query, key, value, weights, logs, output, *tiles = ctx.saved_tensors
        deltas = weights * (gradient.float() * output.float()).sum(dim=3, keepdim=True)
        given = gradient, query, key, value, weights, logs, deltas
        found = backward(*given, Tiles(*tiles), ctx.block, ctx.scaling)
        return *found, None, None, None
