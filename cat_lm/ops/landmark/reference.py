"""Attention to chosen blocks by masks of [B, H, T, S]: the definition, and through SDPA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.landmark.layout import BlockLayout

# Queries whose mask is made at a time.
QUERY_CHUNK = 512


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat what heads of keys have, [B, G, …], for the heads of queries: [B, H, …]."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], dim=1)


def local_keys(layout: BlockLayout, keys: int, local: int) -> Tensor:
    """Return the keys near each query: its block's up to itself, and those of local − 1 before.

    A padding token sees itself alone, so that no query has nothing to attend to. [R, 1, T, S] bool.
    """
    of_keys = layout.key_positions(keys)[:, None]
    of_queries = layout.positions[:, :, None]
    slots = torch.arange(keys, device=layout.slots.device)
    own = of_queries.div(layout.block, rounding_mode="floor")
    found = (slots <= layout.slots[:, None]) & (of_keys >= 0) & (of_queries >= 0)
    found = found & (of_keys >= (own - local + 1) * layout.block)
    if layout.documents is not None:
        found = found & (layout.documents[:, :, None] == layout.tokens[1][:, None])
    return (found | ((slots == layout.slots[:, None]) & (of_queries < 0)))[:, None]


def chosen_blocks(selected: Tensor, blocks: int) -> Tensor:
    """Turn places [B, G, T, m], −1 for none, into a mask [B, G, T, n]."""
    mask = selected.new_zeros((*selected.shape[:3], blocks + 1), dtype=torch.bool)
    index = torch.where(selected < 0, blocks, selected).long()
    return mask.scatter(3, index, True)[..., :blocks]


def _keys_of_chosen(chosen: Tensor, layout: BlockLayout, keys: int) -> Tensor:
    """Return the keys of chosen blocks: a mask [B, G, T, n] to [B, G, T, S]."""
    index = layout.key_blocks(keys)[:, None, None].expand(*chosen.shape[:3], keys)
    return F.pad(chosen, (0, 1)).gather(3, index)


def attend_by_masks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
    dropout: float,
    keeps_maps: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the local keys and those of chosen blocks, in one softmax.

    Args:
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        selected: places of blocks [B, G, T, m], see `select_blocks`.
        keeps_maps: whether to compute eagerly and give the maps; else by SDPA, in parts.

    Returns:
        [B, H, T, D], and the maps [B, H, T, S] or None.
    """
    heads, keys = query.shape[1], key.shape[2]
    key, value = (for_heads(x, heads) for x in (key, value))
    parts: list[Tensor] = []
    size = query.shape[2] if keeps_maps else QUERY_CHUNK
    for start in range(0, query.shape[2], size):
        rows = slice(start, start + size)
        own = layout.of_queries(rows)
        chosen = chosen_blocks(selected[:, :, rows], own.numbers.shape[1])
        mask = local_keys(own, keys, local) | _keys_of_chosen(chosen, own, keys)
        mask = for_heads(mask, heads)
        if keeps_maps:
            scores = (query @ key.mT * scaling).masked_fill(~mask, -torch.inf)
            maps = scores.softmax(dim=-1, dtype=precise(scores)).to(query.dtype)
            maps = F.dropout(maps, dropout, training=dropout > 0)
            return maps @ value, maps
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, rows], key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
            )
        )
    return torch.cat(parts, dim=2), None


def precise(scores: Tensor) -> torch.dtype:
    """Return the dtype of a softmax: at least fp32."""
    return torch.promote_types(scores.dtype, torch.float32)
