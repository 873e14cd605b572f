"""What a pattern's module is given, the keys that a query sees, and softmax's module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from cat_lm.model.cache import LayerStateMixin
    from cat_lm.model.sequence import SequenceGroup


@dataclass
class AttentionCall:
    """What a pattern's module gets beside queries, keys and values.

    Attributes:
        attend: the configuration's attention function with its transform of scores: takes query
            [B, H, T, D], key and value [B, H or fewer, S, D], returns [B, T, H, values' width] and
            maps or None. A pattern that cuts rows also gives the mask, as the function takes it
            (None for a causal one), and the positions of queries and keys, all three or none.
        mask: what `Pattern.mask` made; None for a pattern that masks keys itself.
        scaling: of q·k, 1 / (t sqrt(D)).
        dropout: the part of the maps to drop, 0 outside training.
        continues: whether there are keys that are not among the new ones.
        state: the layer's named states, see `cat_lm.model.cache`; None without a cache.
        documents: [B, T]; None where rows are not packed.
        padding: [B, T] bool, False at padding; None where there is none.
        query_positions: [B or 1, T], and key_positions: [B or 1, S]; None unless a pattern or a
            transform reads positions.
        losses: where to add a loss of the layer's own, a number; None where nobody asks for it.
        borders: of the documents, as `document_borders` returns them; None if unknown.
        group: the ranks that share the heads, see `cat_lm.model.sequence`; None for one alone.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None]]
    mask: Any
    scaling: float
    dropout: float
    continues: bool
    state: LayerStateMixin | None
    documents: Tensor | None
    padding: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    losses: list[Tensor] | None = None
    borders: Tensor | None = None
    group: SequenceGroup | None = None


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
