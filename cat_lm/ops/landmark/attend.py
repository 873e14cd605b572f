"""Attention to local keys and chosen blocks, and which backend computes a call.

`attend_by_masks` is the definition, and serves everything; `attend_gathered` copies the blocks of a
few queries, for decoding; `segments` has the Triton kernel for whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.landmark.decode import has_kernel
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.segments import segments_of, why_not
from cat_lm.ops.runtime.fake import computing_device
from cat_lm.ops.runtime.flops import flops
from cat_lm.ops.runtime.precision import at_least_fp32
from cat_lm.ops.runtime.triton_launch import INSTALLED

if INSTALLED:
    from cat_lm.ops.landmark.segments_triton import attend_segments

# Queries whose mask is made at a time.
QUERY_CHUNK = 512
# Queries whose blocks are copied together; of more, the copies are the greater part of the work.
FEW_QUERIES = 16

MEANINGS = {
    "reference": "masks of [B, H, T, S], in parts",
    "cpu": "a C++ kernel, for decoding",
    "gather": "copies of the chosen blocks, for decoding",
    "triton": "a Triton kernel, a block and the queries that chose it at a time",
}


def choose_backend(
    implementation: str, queries: int, keys: int, dropout: float, has_triton: bool = False
) -> str:
    """Return the name of the backend, one of MEANINGS, for T queries and S keys of whole rows.

    Args:
        implementation: `attn_implementation`: eager or sdpa.
        has_triton: whether the Triton kernel serves, see `cat_lm.ops.landmark.segments.why_not`.
    """
    if implementation == "eager" or dropout > 0:  # Other implementations have no dropout.
        return "reference"
    if queries <= FEW_QUERIES and queries < keys:
        return "gather"
    return "triton" if has_triton else "reference"


def choose_decoder(
    implementation: str, queries: int, keys: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Return the backend's name for T queries after a cache; the kernel has no gradients."""
    name = choose_backend(implementation, queries, keys, 0.0)
    return "cpu" if name == "gather" and has_kernel(device, dtype) else name


def _flops(*given: Any) -> float:
    """Count the FLOPs of softmax attention to the keys of the selected blocks."""
    _, query, key, _, selected, layout, local, *_ = given
    read = min((selected.shape[3] + local) * layout.block, key.shape[2])
    return 4.0 * query.numel() * read


@flops(_flops)
def attend_blocks(
    implementation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Attend to local keys and chosen blocks, by the backend that `choose_backend` names.

    Args:
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        selected: places of blocks [B, G, T, m], see `cat_lm.ops.landmark.select`.

    Returns:
        [B, H, T, D], and with eager the maps [B, H, T, S].
    """
    has_triton = why_not(computing_device(query), query.dtype, layout.block, query.shape[3]) is None
    name = choose_backend(implementation, query.shape[2], key.shape[2], dropout, has_triton)
    given = query, key, value, selected, layout, local, scaling
    # Models in a stack, which compute as one, have each chosen other blocks.
    if name == "reference" or _is_stacked(query):
        return attend_by_masks(*given, dropout, implementation == "eager")
    return (attend_gathered if name == "gather" else attend_segments)(*given), None


def _is_stacked(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x)


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat tensors of key heads, [B, G, …], for the query heads: [B, H, …]."""
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


def _keys_of_chosen(selected: Tensor, layout: BlockLayout, keys: int) -> Tensor:
    """Return a mask [B, G, T, S] of the keys in the blocks at places [B, G, T, m]; −1 is none."""
    blocks = layout.numbers.shape[1]
    mask = selected.new_zeros((*selected.shape[:3], blocks + 1), dtype=torch.bool)
    mask = mask.scatter(3, torch.where(selected < 0, blocks, selected).long(), True)
    mask = F.pad(mask[..., :blocks], (0, 1))
    index = layout.key_blocks(keys)[:, None, None].expand(*mask.shape[:3], keys)
    return mask.gather(3, index)


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
    """Attend as `attend_blocks`, in one softmax.

    Args:
        keeps_maps: whether to compute eagerly and give the maps; else by SDPA, in parts.
    """
    heads, keys = query.shape[1], key.shape[2]
    key, value = (for_heads(x, heads) for x in (key, value))
    parts: list[Tensor] = []
    size = query.shape[2] if keeps_maps else QUERY_CHUNK
    for start in range(0, query.shape[2], size):
        rows = slice(start, start + size)
        own = layout.of_queries(rows)
        mask = local_keys(own, keys, local) | _keys_of_chosen(selected[:, :, rows], own, keys)
        mask = for_heads(mask, heads)
        if keeps_maps:
            scores = (query @ key.mT * scaling).masked_fill(~mask, -torch.inf)
            maps = scores.softmax(dim=-1, dtype=at_least_fp32(scores)).to(query.dtype)
            maps = F.dropout(maps, dropout, training=dropout > 0)
            return maps @ value, maps
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, rows], key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
            )
        )
    return torch.cat(parts, dim=2), None


def attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
) -> Tensor:
    """Attend as `attend_blocks`, with `selected` of G heads of keys or one, to copies of blocks."""
    batch, heads, time, width = query.shape
    # Queries of the heads that read the same keys side by side: [B, G, T, H / G, D].
    query = query.unflatten(1, (key.shape[1], -1)).transpose(2, 3)
    firsts, lengths = segments_of(selected, layout, local)
    inside = torch.arange(layout.block, device=firsts.device)
    sees = (inside < lengths[..., None]).flatten(3)
    slots = (firsts[..., None] + inside).flatten(3).where(sees, 0)
    logits = query @ _take_own(key, slots).mT * scaling
    logits = logits.masked_fill(~sees[:, :, :, None], -torch.inf)
    weights = logits.softmax(dim=-1, dtype=at_least_fp32(logits)).to(value.dtype)
    output = weights @ _take_own(value, slots)
    return output.transpose(2, 3).reshape(batch, heads, time, width)


def _take_own(x: Tensor, slots: Tensor) -> Tensor:
    """Take rows of x [B, H, S, D] at each head's slots [B, H or 1, T, L]: [B, H, T, L, D]."""
    batch, heads = x.shape[:2]
    rows = torch.arange(batch, device=x.device)[:, None, None, None]
    return x[rows, torch.arange(heads, device=x.device)[:, None, None], slots]
