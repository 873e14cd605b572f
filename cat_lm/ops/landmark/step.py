"""One query after a cache: the choice of blocks and attention in few operators.

What `select_blocks` and `attend_gathered` find by masks, a single query of rows of equal length
knows beforehand: which blocks are candidates, and which keys are near. Equal scores are left to
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.landmark.reference import precise
from cat_lm.ops.landmark.select import Choice, landmark_scores


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: Tensor,
    slot: int,
    padding: int,
    block: int,
    choice: Choice,
    scaling: float,
) -> Tensor | None:
    """Attend with the token at `slot` to local keys and chosen blocks, in one softmax.

    Args:
        query: [B, H, 1, D].
        key, value: [B, H or fewer, S, D].
        landmarks: [B, H or fewer, n, D].
        slot: of the query among the keys.
        padding: the slots of padding that every row begins with.

    Returns:
        [B, H, 1, D]; None where a score is as high as another that is not chosen.
    """
    batch, heads = query.shape[:2]
    shared, width = key.shape[1], key.shape[3]
    own = (slot - padding) // block
    count = max(0, own - choice.local + 1)  # of the blocks before the local ones
    first = 1 if choice.sink and count else 0
    groups = 1 if choice.share == "layer" else shared
    query = query.view(batch, shared, heads // shared, width)
    places = _places(query, landmarks[:, :, first:count], choice.top_k, groups)
    if places is None:
        return None
    places = places + first
    if first:
        places = torch.cat([places.new_zeros(*places.shape[:2], 1), places], dim=2)
    start = padding + count * block
    keys, values = key[:, :, start : slot + 1], value[:, :, start : slot + 1]
    if places.shape[2]:
        chosen = (_blocks(x, places, padding, count, block) for x in (key, value))
        keys, values = (
            torch.cat([far, near], dim=2) for far, near in zip(chosen, (keys, values), strict=True)
        )
    logits = query @ keys.mT * scaling
    output = logits.softmax(dim=-1, dtype=precise(logits)).to(value.dtype) @ values
    return output.view(batch, heads, 1, width)


def _places(query: Tensor, landmarks: Tensor, top_k: int, groups: int) -> Tensor | None:
    """The blocks [B, G, m] of the highest scores; None where others are as high."""
    batch, count = query.shape[0], landmarks.shape[2]
    if count <= top_k:
        return torch.arange(count, device=query.device).expand(batch, groups, -1)
    if top_k == 0:
        return torch.empty(batch, groups, 0, dtype=torch.int64, device=query.device)
    scores = landmark_scores(query.flatten(1, 2)[:, :, None], landmarks)[:, :, 0]
    if groups != scores.shape[1]:
        scores = scores.softmax(dim=-1).unflatten(1, (groups, -1)).sum(dim=2)
    highest, places = scores.topk(top_k + 1, dim=-1)
    if bool((highest[..., -1] == highest[..., -2]).any()):
        return None
    return places[..., :-1].sort(dim=-1).values


def _blocks(x: Tensor, places: Tensor, padding: int, count: int, block: int) -> Tensor:
    """The rows of blocks at `places` [B, H or 1, m] of x [B, H, S, D]: [B, H, m b, D]."""
    batch, heads = x.shape[:2]
    blocks = x[:, :, padding : padding + count * block].unflatten(2, (count, block))
    rows = torch.arange(batch, device=x.device)[:, None, None]
    return blocks[rows, torch.arange(heads, device=x.device)[:, None], places].flatten(2, 3)
