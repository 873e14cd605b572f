"""Attention with a function of logits, for some queries at a time: no maps of [T, S] are held."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cat_lm.model.attention.call import visible_keys
from cat_lm.model.attention.scores import ScoreModule, softmax

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
    for start in range(0, time, ROWS):
        part = slice(start, min(start + ROWS, time))
        # Without a mask queries are the keys, of which later ones are not seen.
        read = slice(0, part.stop if mask is None and time > 1 else keys)
        visible = _visible(mask, documents, query, key, part, read)
        inputs = (
            module, query[:, :, part], key[:, :, read], value[:, :, read], visible,
            query_positions[:, part], key_positions[:, read], scaling, dropout, *tensors,
        )  # fmt: skip
        if time > ROWS and torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *inputs, use_reentrant=False))
        else:
            outputs.append(_attend(*inputs))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _visible(
    mask: Tensor | None,
    documents: Tensor | None,
    query: Tensor,
    key: Tensor,
    part: slice,
    read: slice,
) -> Tensor | None:
    """Tell which of the keys `read` the queries of a part may see, [B or 1, 1, n, m] bool."""
    if mask is not None:
        return visible_keys(mask, query, key)[:, :, part]
    if query.shape[2] == 1:
        return None
    slots = torch.arange(read.stop, device=query.device)
    visible = slots <= slots[part, None]
    if documents is not None:
        visible = visible & (documents[:, part, None] == documents[:, None, read])
        return visible[:, None]
    return visible[None, None]


def _attend(
    module: ScoreModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    dropout: float,
    *tensors: Tensor,
) -> Tensor:
    """Attend with a part of the queries: [B, H, n, D]."""
    batch, heads, time, _ = query.shape
    groups = heads // key.shape[1]
    # Keys' heads are not repeated: [B, H, n, D] is read as [B, keys' heads, groups n, D].
    query = query.reshape(batch, -1, groups * time, query.shape[3])
    logits = (query @ key.mT * scaling).view(batch, heads, time, -1)
    head = torch.arange(heads, device=query.device)[:, None, None]
    where = query_positions[:, None, :, None], key_positions[:, None, None, :], head
    scores = module.score(logits, *where, *tensors)
    if visible is not None:
        # Not -inf: a query of a padding token may see nothing, and must not become NaN.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    maps = F.dropout(softmax(scores).to(value.dtype), dropout, training=dropout > 0)
    output = maps.view(batch, -1, groups * time, maps.shape[3]) @ value
    return output.view(batch, heads, time, -1)
