"""What a pattern's module is given, the keys that a query sees, and softmax's module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.context import Context


@dataclass
class AttentionCall(Context):
    """The context of a layer, and what else its attention is given.

    `mask` is what `Pattern.mask` made. `key_positions` are those of all keys, [B or 1, S]; None
    unless a pattern or a transform reads positions.

    Attributes:
        attend: the configuration's attention function with its transform of scores: takes query
            [B, H, T, D], key and value [B, H or fewer, S, D], returns [B, T, H, values' width] and
            maps or None. A pattern that cuts rows also gives the mask, as the function takes it
            (None for a causal one), and the positions of queries and keys, all three or none.
        scaling: of q·k, 1 / (t sqrt(D)).
        dropout: the part of the maps to drop, 0 outside training.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    scaling: float = 1.0
    dropout: float = 0.0

    @property
    def query_positions(self) -> Tensor:
        """The positions of the queries, [B or 1, T]."""
        return self.positions


class SoftmaxCore(nn.Module):
    """Softmax attention, as the configuration's function computes it."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: query [B, H, T, D], key and value [B, H or fewer, S, D] to [B, T, H, D]."""
        return call.attend(query, key, value)


def visible_keys(attention_mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Return which keys each query may see, [B, 1, T, S] bool; None if all of them.

    Args:
        attention_mask: as for transformers' `eager`, `sdpa` or `flex_attention`.
        query, key: [B, H, T, D] and [B, H, S, D].
    """
    batch, _, time, _ = query.shape
    keys = key.shape[2]
    if attention_mask is None:
        # transformers leaves the mask out for one query, and for queries that start with the keys.
        if time == 1:
            return None
        visible = torch.ones(time, keys, dtype=torch.bool, device=query.device).tril()
    elif not isinstance(attention_mask, Tensor):
        from torch.nn.attention.flex_attention import create_mask

        visible = create_mask(
            attention_mask.mask_mod, batch, None, time, keys, device=str(query.device)
        )
    elif attention_mask.dtype == torch.bool:
        visible = attention_mask
    else:
        visible = attention_mask >= 0  # `eager` adds it to the scores
    return visible.expand(batch, 1, time, keys)


def only_visible(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Return scores [B, H, T, S] that are lowest where `visible` [B, 1, T, S] is False."""
    if visible is None:
        return scores
    # Not -inf: a query of a padding token may see nothing, and must not become NaN.
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)


def softmax(scores: Tensor, visible: Tensor | None, dropout: float, dtype: torch.dtype) -> Tensor:
    """Return the maps of scores [B, H, T, S], computed in fp32 or fp64."""
    computed = torch.promote_types(scores.dtype, torch.float32)
    maps = only_visible(scores, visible).softmax(dim=-1, dtype=computed).to(dtype)
    return F.dropout(maps, dropout, training=dropout > 0)
