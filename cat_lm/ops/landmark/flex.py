"""Attention to chosen blocks by torch's flex attention: for whole rows on a GPU.

Tiles of queries meet the tiles of keys in which one of them sees something, and within these a mask
looks every pair up. Memory grows with T n for the looking up, n blocks, and not with T S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cat_lm.errors import UserError
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.reference import chosen_blocks

TILE = 128  # queries and keys


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
    block_logits: None,
) -> Tensor:
    """Attend as `attend_gathered`, in one softmax alone: blocks as wholes are refused before.

    Raises:
        UserError: gradients are asked for on a CPU, where flex attention has none.
    """
    asked = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if asked and query.device.type == "cpu":
        raise UserError(
            "attn_implementation=flex_attention: has no backward pass on a CPU; use sdpa"
        )
    mask = block_mask(query.shape[1], key.shape[2], selected, layout, local)
    shares = key.shape[1] != query.shape[1]
    return _compiled()(query, key, value, block_mask=mask, scale=scaling, enable_gqa=shares)


def block_mask(
    heads: int, keys: int, selected: Tensor, layout: BlockLayout, local: int
) -> BlockMask:
    """Say which of S keys T queries of H heads see, by tiles and pair by pair.

    Args:
        heads, keys: H and S.
        selected: places of blocks [B, G, T, m].
    """
    batch, groups, time, _ = selected.shape
    chosen = F.pad(chosen_blocks(selected, layout.numbers.shape[1]), (0, 1))  # none of no block
    blocks = layout.key_blocks(keys).expand(batch, -1)
    first, slots = _oldest_near(layout, local), layout.slots
    of_rows, per_group = first.expand(batch, -1), heads // groups

    def sees(row: Tensor, head: Tensor, place: Tensor, column: Tensor) -> Tensor:
        near = (column >= of_rows[row, place]) & (column <= slots[place])
        return near | chosen[row, head // per_group, place, blocks[row, column]]

    tiles = _tiles(chosen[..., :-1], first, layout, keys)
    if groups > 1:
        tiles = tiles.repeat_interleave(per_group, dim=1)
    order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    count = tiles.sum(dim=-1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        count, order, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(time, keys)
    )


def _oldest_near(layout: BlockLayout, local: int) -> Tensor:
    """The slot of each query's oldest local key, [R, T]; a padding token's own."""
    positions = layout.positions
    own = positions.div(layout.block, rounding_mode="floor")
    reach = positions - ((own - local + 1) * layout.block).clamp(min=0)
    return layout.slots - torch.where(positions < 0, 0, reach)


def _tiles(chosen: Tensor, first: Tensor, layout: BlockLayout, keys: int) -> Tensor:
    """Tell in which tiles of keys a query of a tile sees one, [B, G, T / TILE, S / TILE] bool.

    Args:
        chosen: [B, G, T, n] bool.
        first: of the local keys [R, T], which go on to the query's own.
    """
    time, device = chosen.shape[2], chosen.device
    rows = torch.arange(-(-time // TILE) * TILE, device=device).clamp(max=time - 1)
    columns = torch.arange(-(-keys // TILE), device=device)
    least = first[:, rows].unflatten(1, (-1, TILE)).amin(dim=2)[..., None] // TILE
    most = layout.slots[rows].unflatten(0, (-1, TILE)).amax(dim=1)[:, None] // TILE
    near = (columns >= least) & (columns <= most)  # [R, T / TILE, S / TILE]
    begins = layout.starts[..., None] // TILE
    ends = (layout.starts[..., None] + layout.block - 1) // TILE
    holds = (columns >= begins) & (columns <= ends)  # [R, n, S / TILE]
    of_tile = chosen[:, :, rows].unflatten(2, (-1, TILE)).any(dim=3)
    far = of_tile.float() @ holds[:, None].float() > 0
    return far | near[:, None]


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
