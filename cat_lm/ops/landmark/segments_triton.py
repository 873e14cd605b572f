"""Attention to chosen and local blocks, each by itself, and their sum: Triton kernels.

What a query gets of each of its segments (see `segments`), o_s with the logarithm of its weight
l_s, waits in a place of its own:

    y = sum_s w_s o_s,     w = softmax(l),

Backward, with δ_s = w_s dy·y and p the softmax within a segment:

    dv = w p dy,     d(q·k) = p (w dy·v − δ),

a block's keys by one program, in the order of the tiles: no atomics, the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.convolution.triton.tiles import UPCAST
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.segments import Tiles, padded_sizes, segments_of, tile_segments
from cat_lm.ops.runtime.fake import is_fake
from cat_lm.ops.runtime.operators import refuse_second_derivative
from cat_lm.ops.runtime.triton_launch import on_device_of, unit_stride

# Sizes that differ from call to call: nothing is compiled anew for those that 16 divides, or 1.
VARYING = ("time", "keys", "segments")


class Constants(NamedTuple):
    """Compile-time constants: b and D as powers of 2, a tile's queries, and products."""

    block: int
    width: int
    tile: int
    precision: str


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _load_queries(pairs_ptr, lengths_ptr, tile, group, time, segments, TILE: tl.constexpr):
    """Load a tile's queries, the keys that they see, and their segments' indices in a head."""
    pair = tl.load(pairs_ptr + tile * TILE + tl.arange(0, TILE))
    there = pair >= 0
    length = tl.load(lengths_ptr + pair, there, 0)
    within = tl.where(there, pair - group * time * segments, 0)
    return there, length, within // segments, within


@triton.jit
def _load_rows(x, row, head, place, inside, column, width):
    """Load rows of a head, with zeros for missing rows."""
    x_ptr, stride_b, stride_h, stride_t = x
    x_ptr += row * stride_b + head * stride_h
    at = x_ptr + place[:, None] * stride_t + column[None, :]
    return tl.load(at, inside[:, None] & (column < width)[None, :], 0.0)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, parts_ptr, logs_ptr, tiles, scaling, time, keys, segments, shape, SIDES: tl.constexpr
):
    """Compute the outputs of a tile's queries from a block of keys, and log-sum-exp weights.

    Args:
        q, k, v: a pointer each, and the strides of rows, heads and steps.
        tiles: pointers of pairs, lengths and codes.
        shape: heads, those of keys, those of choices, and width.
    """
    pairs_ptr, lengths_ptr, codes_ptr = tiles
    heads, shared, groups, width = shape
    PRECISION: tl.constexpr = SIDES.precision
    tile = tl.program_id(0).to(tl.int64)
    code = tl.load(codes_ptr + tile)
    group, start = code // keys, code % keys
    row = group // groups
    head = (group % groups) * (heads // groups) + tl.program_id(1)
    source = head // (heads // shared)
    there, length, place, within = _load_queries(
        pairs_ptr, lengths_ptr, tile, group, time, segments, SIDES.tile
    )
    column, inner = tl.arange(0, SIDES.width), tl.arange(0, SIDES.block)
    slot, inside = start + inner, start + inner < keys
    queries = _load_rows(q, row, head, place, there, column, width)
    own_keys = _load_rows(k, row, source, slot, inside, column, width)
    values = _load_rows(v, row, source, slot, inside, column, width)
    logits = _dot(queries, tl.trans(own_keys), PRECISION) * scaling
    logits = tl.where(inner[None, :] < length[:, None], logits, -float("inf"))
    highest = tl.where(there, tl.max(logits, axis=1), 0.0)
    weights = tl.exp(logits - highest[:, None])
    total = tl.where(there, tl.sum(weights, axis=1), 1.0)
    part = _dot((weights / total[:, None]).to(values.dtype), values, PRECISION)
    at = (row * heads + head) * time * segments + within
    tl.store(logs_ptr + at, highest + tl.log(total), there)
    to = parts_ptr + at[:, None] * width + column[None, :]
    seen = there[:, None] & (column < width)[None, :]
    tl.store(to, part.to(parts_ptr.dtype.element_ty), seen)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dy,
    q,
    k,
    v,
    of_queries,
    results,
    tiles,
    runs,
    scaling,
    time,
    keys,
    segments,
    shape,
    SIDES: tl.constexpr,
):
    """Gradients of a block's keys and values, and the queries' parts, by all tiles that met it.

    Args:
        of_queries: pointers of weights, logarithms and deltas.
        results: pointers to the gradients of q, k and v.
        runs: pointers to the first tiles, counts and extents of runs.
        q, k, v, tiles, shape: as in `forward_kernel`; dy as q.
    """
    weights_ptr, logs_ptr, deltas_ptr = of_queries
    dq_ptr, dk_ptr, dv_ptr = results
    pairs_ptr, lengths_ptr, codes_ptr = tiles
    firsts_ptr, counts_ptr, extents_ptr = runs
    heads, shared, groups, width = shape
    PRECISION: tl.constexpr = SIDES.precision
    run = tl.program_id(0).to(tl.int64)
    first, count = tl.load(firsts_ptr + run), tl.load(counts_ptr + run)
    code, extent = tl.load(codes_ptr + first), tl.load(extents_ptr + run)
    group, start = code // keys, code % keys
    row = group // groups
    source = (group % groups) * (shared // groups) + tl.program_id(1)
    column, inner = tl.arange(0, SIDES.width), tl.arange(0, SIDES.block)
    slot, inside = start + inner, start + inner < keys
    own_keys = _load_rows(k, row, source, slot, inside, column, width)
    values = _load_rows(v, row, source, slot, inside, column, width)
    BLOCK: tl.constexpr = SIDES.block
    WIDTH: tl.constexpr = SIDES.width
    dk = tl.zeros((BLOCK, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK, WIDTH), tl.float32)
    each = heads // shared
    for member in range(each):
        head = source * each + member
        for step in range(count):
            there, length, place, within = _load_queries(
                pairs_ptr, lengths_ptr, first + step, group, time, segments, SIDES.tile
            )
            at = (row * heads + head) * time * segments + within
            weight = tl.load(weights_ptr + at, there, 0.0)
            log = tl.load(logs_ptr + at, there, 0.0)
            delta = tl.load(deltas_ptr + at, there, 0.0)
            queries = _load_rows(q, row, head, place, there, column, width)
            gradient = _load_rows(dy, row, head, place, there, column, width)
            logits = _dot(queries, tl.trans(own_keys), PRECISION) * scaling
            seen = inner[None, :] < length[:, None]
            inner_weights = tl.where(seen, tl.exp(logits - log[:, None]), 0.0)
            shares = (inner_weights * weight[:, None]).to(gradient.dtype)
            dv += _dot(tl.trans(shares), gradient, PRECISION)
            of_shares = _dot(gradient, tl.trans(values), PRECISION)
            dlogits = inner_weights * (of_shares * weight[:, None] - delta[:, None]) * scaling
            dlogits = dlogits.to(queries.dtype)
            dk += _dot(tl.trans(dlogits), queries, PRECISION)
            dq = _dot(dlogits, own_keys, PRECISION)
            to = dq_ptr + at[:, None] * width + column[None, :]
            tl.store(to, dq, there[:, None] & (column < width)[None, :])
    kept = (inner < extent)[:, None] & (column < width)[None, :]
    at = ((row * shared + source) * keys + slot)[:, None] * width + column[None, :]
    tl.store(dk_ptr + at, dk, kept)
    tl.store(dv_ptr + at, dv, kept)


def options(block: int, width: int, dtype: torch.dtype, backward: bool) -> dict[str, Any]:
    """Return what a kernel is compiled for, and how: tiles whose sums fit into registers.

    Tiles of 64 queries are of asynchronous products on Hopper. Where the gradients' are many, ptxas
    restores matrix descriptors while products are under way (tests/cat_lm/ops/test_triton_sass.py),
    and in fp32, in which each is three, spills up to 2 KB of a thread: tiles are smaller there.
    """
    keys, columns = padded_sizes(block, width)
    is_large = keys * columns * dtype.itemsize >= 2**14
    tile = 16 if dtype == torch.float32 else 64 if columns <= keys <= 64 else 32
    compiled = Constants(keys, columns, tile, "ieee" if torch.version.hip is not None else "tf32x3")
    return {"SIDES": compiled, "num_warps": 8 if is_large or backward else 4, "num_stages": 1}


def _kernel_arguments(query: Tensor, key: Tensor, value: Tensor, tiles: Tiles) -> dict[str, Any]:
    """Return the arguments that both kernels take."""
    given = {n: (x, *x.stride()[:3]) for n, x in zip("qkv", (query, key, value), strict=True)}
    return given | {
        "tiles": (tiles.pairs, tiles.lengths, tiles.codes),
        "time": query.shape[2],
        "keys": key.shape[2],
        "segments": tiles.lengths.shape[3],
        "shape": (query.shape[1], key.shape[1], tiles.lengths.shape[1], query.shape[3]),
    }


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
    tile = options(layout.block, query.shape[3], query.dtype, False)["SIDES"].tile
    tiles = tile_segments(firsts, lengths, key.shape[2], tile)
    return SegmentAttention.apply(query, key, value, tiles, layout.block, scaling)


class SegmentAttention(torch.autograd.Function):
    """Attention by segments; gradients of queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Tiles,
        block: int,
        scaling: float,
    ) -> Tensor:
        query, key, value = (unit_stride(x) for x in (query, key, value))
        shape = *query.shape[:3], tiles.lengths.shape[3]  # [B, H, T, M]
        parts = query.new_zeros(*shape, query.shape[3])
        logs = torch.full(shape, -torch.inf, device=query.device)
        if not is_fake(query):
            with on_device_of(query):
                forward_kernel[(tiles.codes.shape[0], query.shape[1] // tiles.lengths.shape[1])](
                    **_kernel_arguments(query, key, value, tiles),
                    parts_ptr=parts,
                    logs_ptr=logs,
                    scaling=scaling,
                    **options(block, query.shape[3], query.dtype, False),
                )
        weights = logs.softmax(dim=3)
        output = (weights.to(parts.dtype)[..., None, :] @ parts).squeeze(3)
        ctx.save_for_backward(query, key, value, weights, logs, output, *vars(tiles).values())
        ctx.block, ctx.scaling = block, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("landmark attention by its Triton kernel")
        query, key, value, weights, logs, output, *tiles = ctx.saved_tensors
        tiles, gradient = Tiles(*tiles), unit_stride(gradient)
        deltas = weights * (gradient.float() * output.float()).sum(dim=3, keepdim=True)
        of_parts = logs.new_zeros(*logs.shape, query.shape[3])
        of_keys, of_values = (torch.zeros(key.shape, device=key.device) for _ in range(2))
        with on_device_of(query):
            backward_kernel[(tiles.counts.shape[0], key.shape[1] // tiles.lengths.shape[1])](
                **_kernel_arguments(query, key, value, tiles),
                dy=(gradient, *gradient.stride()[:3]),
                of_queries=(weights.contiguous(), logs, deltas.contiguous()),
                results=(of_parts, of_keys, of_values),
                runs=(tiles.firsts, tiles.counts, tiles.extents),
                scaling=ctx.scaling,
                **options(ctx.block, query.shape[3], query.dtype, True),
            )
        found = (of_parts.sum(dim=3), of_keys, of_values)
        return *(x.to(query.dtype) for x in found), None, None, None
