"""The choice of blocks by their landmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.runtime.precision import at_least_fp32, without_autocast

# Queries whose scores are held at a time.
QUERY_CHUNK = 256


@dataclass(frozen=True)
class Choice:
    """The choice of a query's blocks.

    Attributes:
        top_k: number of blocks to select, besides those near the query.
        local: number of last blocks to attend to, including the query's own.
        sink: whether the first block of the document always is.
        share: "head": each head of keys has a choice of its own; "layer": all heads have one.
    """

    top_k: int
    local: int = 2
    sink: bool = False
    share: str = "head"


def landmark_scores(query: Tensor, landmarks: Tensor) -> Tensor:
    """q·K̄ in at least fp32: query [B, H, T, D], landmarks [B, H or fewer, n, D] to [B, H, T, n]."""
    dtype = at_least_fp32(query)
    time = query.shape[2]
    grouped = query.unflatten(1, (landmarks.shape[1], -1)).flatten(2, 3).to(dtype)
    with without_autocast(query):
        scores = grouped @ landmarks.to(dtype).mT
    return scores.unflatten(2, (-1, time)).flatten(1, 2)


@torch.no_grad()
def choose_blocks(query: Tensor, landmarks: Tensor, layout: BlockLayout, choice: Choice) -> Tensor:
    """Choose blocks for queries [B, H, T, D] by landmarks [B, H or fewer, n, D], in parts.

    Returns:
        `select_blocks`' places [B, G, T, m].
    """
    places = []
    groups = 1 if choice.share == "layer" else landmarks.shape[1]
    for start in range(0, query.shape[2], QUERY_CHUNK):
        part = slice(start, start + QUERY_CHUNK)
        scores = landmark_scores(query[:, :, part], landmarks)
        places.append(select_blocks(scores, layout.of_queries(part), choice, groups))
    return torch.cat(places, dim=2)


def select_blocks(scores: Tensor, layout: BlockLayout, choice: Choice, groups: int) -> Tensor:
    """Select each query's top-k blocks among the candidates of `candidates_of`.

    Ties go to the earlier block. Heads that share a choice sum their softmax over the candidates.

    Args:
        scores: [B, H, T, n], of all heads of queries.
        groups: G, the number of choices, which divides H.

    Returns:
        Places in `layout.starts` [B, G, T, m] int32, ascending, −1 behind the last; m at most
        top_k, and one more with a sink.
    """
    old = candidates_of(layout, choice.local)
    is_first = (layout.numbers == 0)[:, None, None]
    candidates = old & ~is_first if choice.sink else old
    scores = scores.masked_fill(~candidates, -torch.inf)
    if groups != scores.shape[1]:
        # Not a number where there is no candidate: none of them is chosen anyway.
        shares = scores.softmax(dim=-1).nan_to_num(0.0).unflatten(1, (groups, -1)).sum(dim=2)
        scores = shares.masked_fill(~candidates, -torch.inf)
    chosen = _top_candidates(scores, candidates, choice.top_k)
    if choice.sink:
        chosen = chosen | (old & is_first)
    return _true_indices(chosen, choice.top_k + choice.sink)


def candidates_of(layout: BlockLayout, local: int) -> Tensor:
    """Return a mask of the selectable blocks of each query, bool [R, 1, T, n].

    They are the blocks of its document, except for its own block and the `local` - 1 before it."""
    own = layout.positions.div(layout.block, rounding_mode="floor")
    numbers = layout.numbers[:, None]
    found = (numbers >= 0) & (numbers <= own[:, :, None] - local)
    if layout.documents is not None:
        found = found & (layout.documents[:, :, None] == layout.block_documents[:, None])
    return found[:, None]


def _top_candidates(scores: Tensor, candidates: Tensor, top_k: int) -> Tensor:
    """Return the `top_k` highest candidates of scores [B, G, T, n]; ties go to the first."""
    if top_k >= scores.shape[-1]:
        return candidates.expand_as(scores)
    if top_k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(top_k, dim=-1).values[..., -1:]
    above, level = scores > least, (scores == least) & candidates
    room = top_k - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))


def _true_indices(chosen: Tensor, most: int) -> Tensor:
    """Return the indices of the True entries of [B, G, T, n], ascending, padded by −1: [B, G, T,
    m].
    """
    count = chosen.shape[-1]
    numbers = torch.where(chosen, torch.arange(count, device=chosen.device), count)
    places = numbers.topk(min(most, count), dim=-1, largest=False, sorted=True).values
    return places.masked_fill(places == count, -1).int()
