"""Attention to chosen and local blocks, each by itself, and their sum: by a Triton kernel.

What a query sees is cut into segments: M = m + local runs of at most b keys, the first `length` of
a block's. A tile of queries meets a segment's block of keys in one product, and what a query gets
of each, o_s with the logarithm of its weight l_s, waits in a place of its own:

    y = sum_s w_s o_s,     w = softmax(l),

or softmax of the blocks' own logits for those that are weighed as wholes. Backward, with δ_s the
part of w_s dy·y that is the segment's, p the softmax within it and dl_s = w_s (dy·o_s − dy·y):

    dv = w p dy,     d(q·k) = p (w dy·v − δ),     δ = w dy·o − dl,

a block's keys by one program, in the order of the tiles: no atomics, the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cat_lm.ops.landmark.blocks import tiles_of
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.runtime.triton_launch import INSTALLED, INTERPRETED

# Keys of a block times channels of a head, both as powers of 2, that fit into shared memory.
MOST = {torch.float32: 64 * 64, torch.bfloat16: 128 * 128, torch.float16: 128 * 128}


@dataclass(frozen=True)
class Tiles:
    """Hold which queries meet which block of keys.

    Attributes:
        pairs: [tiles, TILE], numbers within [B, G, T, M]; −1 for none.
        lengths: [B, G, T, M], keys of the segment that the query sees; 0 where there is none.
        codes: [tiles], (row G + group) S + the block's first slot; equal ones follow each other.
        firsts, counts: [runs], of tiles with the same code.
        extents: [runs], the longest of their segments.
    """

    pairs: Tensor
    lengths: Tensor
    codes: Tensor
    firsts: Tensor
    counts: Tensor
    extents: Tensor


def why_not(device: torch.device, dtype: torch.dtype, block: int, width: int) -> str | None:
    """Say why the kernel cannot serve; None where it can."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return f"it computes cuda tensors, not {device.type} tensors"
    if dtype not in MOST:
        return f"it has no {str(dtype).removeprefix('torch.')}"
    held = sides(block)[0] * sides(width)[0]
    if held <= MOST[dtype]:
        return None
    return (
        f"block={block} by heads of {width} channels are {held} numbers of its {MOST[dtype]} in "
        f"{str(dtype).removeprefix('torch.')}"
    )


def sides(*sizes: int) -> list[int]:
    """Give the sides of matrices that hold these sizes: powers of 2, of a product at least 16."""
    return [max(16, 1 << (size - 1).bit_length()) for size in sizes]


def segments_of(selected: Tensor, layout: BlockLayout, local: int) -> tuple[Tensor, Tensor]:
    """Give each query's segments, the chosen ones first, the query's own block last.

    Args:
        selected: places of blocks [B, G, T, m].

    Returns:
        Their first slots and lengths, both [B, G, T, m + local]; a length of 0 is none.
    """
    block, shape = layout.block, selected.shape[:3]
    starts = layout.starts[:, None, None].expand(*shape, -1)
    far = starts.gather(3, selected.clamp(min=0).long())
    back = torch.arange(local - 1, -1, -1, device=selected.device)
    positions = layout.positions[..., None]  # [R, T, 1]
    behind = positions % block + back * block  # of the segment's first key, behind the query
    lengths = torch.where(behind <= positions, behind + 1, 0).clamp(max=block)
    # A padding token sees itself.
    is_own = (back == 0).expand_as(behind)
    behind = torch.where(positions < 0, 0, behind)
    lengths = torch.where(positions < 0, is_own.long(), lengths)
    near = torch.where(lengths > 0, layout.slots[:, None] - behind, 0)
    near, lengths = (x[:, None].expand(*shape, -1) for x in (near, lengths))
    return (
        torch.cat([far, near], dim=3),
        torch.cat([torch.where(selected < 0, 0, block), lengths], dim=3),
    )


def tile_segments(firsts: Tensor, lengths: Tensor, keys: int, tile: int) -> Tiles:
    """Put together the queries of every block, by segments [B, G, T, M]."""
    groups = firsts.shape[0] * firsts.shape[1]
    group = torch.arange(groups, device=firsts.device).view(*firsts.shape[:2], 1, 1)
    code = torch.where(lengths > 0, group * keys + firsts, -1).flatten()
    pairs, codes = tiles_of(code, groups * keys, tile)
    pairs = torch.where(pairs == code.shape[0], -1, pairs)
    _, run, counts = codes.unique_consecutive(return_inverse=True, return_counts=True)
    longest = torch.where(pairs < 0, 0, lengths.flatten()[pairs.clamp(min=0)]).amax(dim=1)
    extents = longest.new_zeros(counts.shape[0]).scatter_reduce(0, run, longest, "amax")
    return Tiles(pairs, lengths.contiguous(), codes, counts.cumsum(0) - counts, counts, extents)


@torch.compiler.disable
def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
    block_logits: Tensor | None,
) -> Tensor:
    """Attend as `attend_gathered`, where `why_not` says nothing."""
    from cat_lm.ops.landmark import segments_triton as kernels

    firsts, lengths = segments_of(selected, layout, local)
    tile = kernels.options(layout.block, query.shape[3], query.dtype, False)["TILE"]
    tiles = tile_segments(firsts, lengths, key.shape[2], tile)
    if block_logits is not None:
        block_logits = block_logits.float().masked_fill(
            (selected < 0).repeat_interleave(query.shape[1] // selected.shape[1], dim=1), -torch.inf
        )
    return _Attention.apply(query, key, value, block_logits, tiles, layout.block, scaling)


class _Attention(torch.autograd.Function):
    """Attention by segments; gradients of queries, keys, values and blocks' logits."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_logits: Tensor | None,
        tiles: Tiles,
        block: int,
        scaling: float,
    ) -> Tensor:
        from cat_lm.ops.landmark import segments_triton as kernels

        parts, logs = kernels.forward(query, key, value, tiles, block, scaling)
        chosen = 0 if block_logits is None else block_logits.shape[3]
        logits = logs if not chosen else torch.cat([block_logits, logs[..., chosen:]], dim=3)
        weights = logits.softmax(dim=3)
        output = (weights.to(parts.dtype)[..., None, :] @ parts).squeeze(3)
        # Of what is one softmax, the output says enough of the parts.
        ctx.save_for_backward(query, key, value, weights, logs, parts if chosen else output)
        ctx.tiles, ctx.block, ctx.scaling, ctx.chosen = tiles, block, scaling, chosen
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from cat_lm.ops.landmark import segments_triton as kernels

        query, key, value, weights, logs, kept = ctx.saved_tensors
        exact, of_logits = gradient.float(), None
        if ctx.chosen:
            dots = (exact[..., None, :] @ kept.float().mT).squeeze(3)
            whole = (weights * dots).sum(dim=3, keepdim=True)
            deltas = weights * whole
            far = weights[..., : ctx.chosen]
            deltas[..., : ctx.chosen] = far * dots[..., : ctx.chosen]
            of_logits = far * (dots[..., : ctx.chosen] - whole)
        else:
            deltas = weights * (exact * kept.float()).sum(dim=3, keepdim=True)
        found = kernels.backward(
            gradient, query, key, value, weights, logs, deltas, ctx.tiles, ctx.block, ctx.scaling
        )
        return *found, of_logits, None, None, None
