"""Attention with a function of logits, for some queries at a time: no maps of [T, S] are held."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cat_lm.model.attention.modules.call import visible_keys
from cat_lm.model.attention.modules.scores import ScoreModule, softmax

ROWS = 128  # queries of a part


def attend_by_rows(
    module: ScoreModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attend with `module.score`; a part's maps are computed again in the backward pass.

    Args:
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        mask: as transformers makes it for sdpa; None for a causal one, or a single query.
        documents: [B, T], kept apart where there is no mask; None where rows are not packed.
        query_positions: [B or 1, T].
        key_positions: [B or 1, S].

    Returns:
        [B, T, H, D].
    """
    time, keys, tensors = query.shape[2], key.shape[2], module()
    outputs = []
    # Without a mask queries are the keys, of which later ones are not seen.
    is_causal = mask is None and time > 1
    for start in range(0, time, ROWS):
        part = slice(start, min(start + ROWS, time))
        read = slice(0, part.stop if is_causal else keys)
        # Views, and what is seen is found inside: else every layer would keep it, a number a pair.
        inputs = (
            module, query[:, :, part], key[:, :, read], value[:, :, read],
            None if mask is None else mask[:, :, part],
            documents[:, read] if is_causal and documents is not None else None,
            start if is_causal else None,
            query_positions[:, part], key_positions[:, read], scaling, dropout, *tensors,
        )  # fmt: skip
        if time > ROWS and torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *inputs, use_reentrant=False))
        else:
            outputs.append(_attend(*inputs))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _visible(
    mask: Tensor | None, documents: Tensor | None, start: int | None, query: Tensor, key: Tensor
) -> Tensor | None:
    """Return which keys the queries of a part may see, [B or 1, 1, n, m] bool; None for all.

    Args:
        mask: of these queries.
        documents: [B, m], of the keys, the last n of which are the queries.
        start: of the queries among the keys; None where there is a mask, or all are seen.
    """
    if mask is not None:
        return visible_keys(mask, query, key)
    if start is None:
        return None
    slots = torch.arange(key.shape[2], device=query.device)
    visible = slots <= slots[start:, None]
    if documents is not None:
        visible = visible & (documents[:, start:, None] == documents[:, None])
        return visible[:, None]
    return visible[None, None]


def _attend(
    module: ScoreModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    start: int | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    dropout: float,
    *tensors: Tensor,
) -> Tensor:
    """Attend with a part of the queries: [B, H, n, D]; mask, documents, start of `_visible`."""
    batch, heads, time, _ = query.shape
    head = module.heads_of(query)[:, None, None]
    visible = _visible(mask, documents, start, query, key)
    groups = heads // key.shape[1]
    # Keys' heads are not repeated: [B, H, n, D] is read as [B, keys' heads, groups n, D].
    query = query.reshape(batch, -1, groups * time, query.shape[3])
    logits = (query @ key.mT * scaling).view(batch, heads, time, -1)
    where = query_positions[:, None, :, None], key_positions[:, None, None, :], head
    scores = module.score(logits, *where, *tensors)
    if visible is not None:
        # Not -inf: a query of a padding token may see nothing, and must not become NaN.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    maps = F.dropout(softmax(scores).to(value.dtype), dropout, training=dropout > 0)
    output = maps.view(batch, -1, groups * time, maps.shape[3]) @ value
    return output.view(batch, heads, time, -1)
