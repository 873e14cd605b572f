"""Which queries meet which block of keys in the Triton kernel: segments, put together in tiles.

What a query sees is cut into segments: M = m + local runs of at most b keys, the first `length` of
a block's. A tile of queries meets a segment's block of keys in one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.runtime import triton_launch
from cat_lm.ops.runtime.fake import is_fake

# Keys of a block times channels of a head, both as powers of 2, that fit into shared memory.
MOST = {torch.float32: 64 * 64, torch.bfloat16: 128 * 128, torch.float16: 128 * 128}


def why_not(device: torch.device, dtype: torch.dtype, block: int, width: int) -> str | None:
    """Return why the kernel cannot serve; None where it can."""
    if obstacle := triton_launch.why_not(device, dtype):
        return obstacle
    held = padded_sizes(block)[0] * padded_sizes(width)[0]
    if held <= MOST[dtype]:
        return None
    return (
        f"block={block} by heads of {width} channels are {held} numbers of its {MOST[dtype]} in "
        f"{str(dtype).removeprefix('torch.')}"
    )


@dataclass(frozen=True)
class Tiles:
    """The tiles of queries that attend to each block of keys.

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


def padded_sizes(*sizes: int) -> list[int]:
    """Return power-of-two sides of matrices that hold these sizes; each product is at least 16."""
    return [max(16, 1 << (size - 1).bit_length()) for size in sizes]


def segments_of(selected: Tensor, layout: BlockLayout, local: int) -> tuple[Tensor, Tensor]:
    """Return each query's segments, the chosen ones first, the query's own block last.

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
    # The distance from the query back to the first key of each segment.
    behind = positions % block + back * block
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
    """Group the queries of every block into tiles, by segments [B, G, T, M]."""
    groups = firsts.shape[0] * firsts.shape[1]
    group = torch.arange(groups, device=firsts.device).view(*firsts.shape[:2], 1, 1)
    code = torch.where(lengths > 0, group * keys + firsts, -1).flatten()
    pairs, codes = tiles_of(code, groups * keys, tile)
    pairs = torch.where(pairs == code.shape[0], -1, pairs)
    if is_fake(codes):  # Without values, assume that every tile has a block of its own.
        return Tiles(pairs, lengths.contiguous(), codes, codes, codes, codes)
    _, run, counts = codes.unique_consecutive(return_inverse=True, return_counts=True)
    longest = torch.where(pairs < 0, 0, lengths.flatten()[pairs.clamp(min=0)]).amax(dim=1)
    extents = longest.new_zeros(counts.shape[0]).scatter_reduce(0, run, longest, "amax")
    return Tiles(pairs, lengths.contiguous(), codes, counts.cumsum(0) - counts, counts, extents)


def tiles_of(chosen: Tensor, blocks: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return tiles of the queries that selected the same block.

    Args:
        chosen: [N] places of blocks, −1 for none.
        tile: the most queries together.

    Returns:
        Numbers within `chosen` [tiles, tile], N for none, and the tiles' blocks [tiles], ascending.
    """
    count = chosen.shape[0]
    if is_fake(chosen):  # Without values, assume that the last tile of each block is half full.
        tiles = -(-count // tile) + blocks // 2
        return chosen.new_empty(tiles, tile), chosen.new_empty(tiles)
    order = torch.where(chosen < 0, blocks, chosen).argsort(stable=True)
    sizes = torch.bincount(chosen[chosen >= 0], minlength=blocks)
    order = order[: int(sizes.sum())]
    tiles = (sizes + tile - 1) // tile
    of_block = torch.arange(blocks, device=chosen.device).repeat_interleave(tiles)
    place = torch.arange(order.shape[0], device=chosen.device)
    of_pair = chosen[order]
    within = place - (sizes.cumsum(0) - sizes)[of_pair]
    first = (tiles.cumsum(0) - tiles)[of_pair]
    table = chosen.new_full((of_block.shape[0] * tile,), count)
    table[first * tile + within] = order
    return table.view(-1, tile), of_block
