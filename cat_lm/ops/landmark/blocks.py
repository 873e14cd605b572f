"""Attention of many queries to chosen blocks, a block at a time: for long prompts.

A block's keys and values meet all the queries that chose it in one product. What a query gets of a
block, and the logarithm of its weight, wait in the query's own place until all are known; nothing
of [T, S] is held, and memory grows with T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.reference import precise
from cat_lm.ops.runtime.fake import is_fake

# Queries that meet a block together, blocks that meet theirs together, and queries whose local keys
# are read together.
TILE = 64
TILES = 256
LOCAL_CHUNK = 128


def attend_block_major(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
) -> Tensor:
    """Attend as `attend_gathered`, one head of keys of one row after another."""
    shared = key.shape[1]
    query_groups = query.unflatten(1, (shared, -1))  # [B, G, H / G, T, D]
    rows = []
    for row in range(query.shape[0]):
        own = _row_of(layout, row)
        heads = []
        for head in range(shared):
            chosen = selected[row, head if selected.shape[1] > 1 else 0]
            output, weights = _attend_local(
                query_groups[row, head], key[row, head], value[row, head], own, local, scaling
            )
            far, far_weights = _attend_chosen(
                query_groups[row, head], key[row, head], value[row, head], chosen, own, scaling
            )
            far_weights = far_weights.masked_fill(chosen < 0, -torch.inf)
            parts = torch.cat([weights[..., None], far_weights], dim=-1).softmax(dim=-1)
            parts = parts.to(value.dtype)
            far = (parts[..., None, 1:] @ far).squeeze(-2)
            heads.append(output * parts[..., :1] + far)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def _row_of(layout: BlockLayout, row: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """A row's slots and positions of queries [T], the starts of its blocks [n], and b."""
    one = row if layout.positions.shape[0] > 1 else 0
    return layout.slots, layout.positions[one], layout.starts[one], layout.block


def _attend_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: tuple[Tensor, Tensor, Tensor, int],
    local: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attend with [g, T, D] to local keys: [g, T, D], and the logarithm of the weight [g, T]."""
    slots, positions, _, block = layout
    time, before = query.shape[1], local * block
    past = key.shape[0] - time if is_fake(key) else int(slots[0])
    outputs, weights = [], []
    for start in range(0, time, LOCAL_CHUNK):
        rows = slice(start, min(start + LOCAL_CHUNK, time))
        first, last = max(0, past + rows.start - before + 1), past + rows.stop
        keys = torch.arange(first, last, device=slots.device)
        back = slots[rows, None] - keys
        own = positions[rows].div(block, rounding_mode="floor")
        reach = positions[rows] - ((own - local + 1) * block).clamp(min=0)
        sees = ((back >= 0) & (back <= reach[:, None])) | (back == 0)  # padding sees itself
        logits = (query[:, rows] @ key[first:last].mT * scaling).masked_fill(~sees, -torch.inf)
        logits = logits.to(precise(logits))
        weights.append(logits.logsumexp(dim=-1))
        outputs.append(logits.softmax(dim=-1).to(value.dtype) @ value[first:last])
    return torch.cat(outputs, dim=1), torch.cat(weights, dim=1)


def _attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    layout: tuple[Tensor, Tensor, Tensor, int],
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attend with [g, T, D] to each chosen block [T, m] by itself.

    Returns:
        [g, T, m, D], zeros where there is no block, and the logarithms of the weights [g, T, m].
    """
    _, _, starts, block = layout
    group, time, width = query.shape
    most = chosen.shape[1]
    pairs, blocks = tiles_of(chosen.flatten().long(), starts.shape[0], TILE)
    outputs = query.new_zeros(group, time * most + 1, width)
    weights = query.new_zeros(group, time * most + 1, dtype=precise(query))
    inside = torch.arange(block, device=starts.device)
    for start in range(0, pairs.shape[0], TILES):
        pair = pairs[start : start + TILES]  # [c, TILE], m T for none
        slots = starts[blocks[start : start + TILES], None] + inside  # [c, b]
        own = query[:, (pair // max(most, 1)).clamp(max=time - 1)]  # [g, c, TILE, D]
        logits = own @ key[slots].mT * scaling
        logits = logits.to(weights.dtype)
        found = logits.softmax(dim=-1).to(value.dtype) @ value[slots]
        outputs = outputs.index_copy(1, pair.flatten(), found.flatten(1, 2))
        weights = weights.index_copy(1, pair.flatten(), logits.logsumexp(dim=-1).flatten(1))
    outputs, weights = (x[:, : time * most] for x in (outputs, weights))
    return outputs.unflatten(1, (time, most)), weights.unflatten(1, (time, most))


def tiles_of(chosen: Tensor, blocks: int, tile: int) -> tuple[Tensor, Tensor]:
    """Put together the queries that chose a block.

    Args:
        chosen: [N] places of blocks, −1 for none.
        tile: the most queries together.

    Returns:
        Numbers within `chosen` [tiles, tile], N for none, and the tiles' blocks [tiles], ascending.
    """
    count = chosen.shape[0]
    if is_fake(chosen):  # as many as there are if the last tile of each block is half empty
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
