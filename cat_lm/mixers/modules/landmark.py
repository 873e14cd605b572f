"""The module of the mixer landmark."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cat_lm.core.parameters import NothingDecays
from cat_lm.mixers.modules.attention import rotated, with_past
from cat_lm.mixers.modules.context import State
from cat_lm.mixers.modules.projections import ConvolvedProjections
from cat_lm.ops.landmark.dispatch import attend_blocks
from cat_lm.ops.landmark.keys import block_weights, initial_parameters, landmark_keys
from cat_lm.ops.landmark.layout import BlockLayout, cached_blocks, sequence_blocks
from cat_lm.ops.landmark.options import DENSE, TAUGHT
from cat_lm.ops.landmark.select import Choice, choose_blocks
from cat_lm.ops.landmark.teaching import attend_densely, guided_loss
from cat_lm.ops.runtime.documents import document_runs

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import landmark

ROWS = 64  # queries of a sequence on which landmarks are taught


class LandmarkMixer(NothingDecays):
    """One layer of Landmark CAT.

    Parameters beside CAT's: `filter` [H, b] and `sharpness` θ [H], see
    `cat_lm.model.attention.modules.landmark`.
    """

    def __init__(self, options: landmark.Options, setting: Setting) -> None:
        super().__init__()
        self.options = options
        self.streams = ConvolvedProjections(setting.d_model, options, options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)
        self.choice = Choice(options.top_k, options.local, options.sink, options.share)
        heads = options.heads
        for name, values in initial_parameters(
            options.landmark_filter, options.block, heads, heads, setting.d_model // heads,
            options.is_sharp,
        ).items():  # fmt: skip
            self.register_parameter(name, nn.Parameter(values))

    @property
    def adds_losses(self) -> bool:
        """Return True if training has a loss of the layer's own."""
        return self.options.training in TAUGHT

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        auxiliary_losses: list[Tensor] | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        q, k, v = self.streams(x, **how)
        if self.options.position == "rope":
            q, k = rotated(q, k, padding_mask, state)
        q, k, v = (stream.transpose(1, 2) for stream in (q, k, v))
        time, real = q.shape[2], padding_mask
        if state is not None:
            k, v, real = with_past(k, v, real, state)
        # An id that comes back is another document's.
        document_ids = None if document_ids is None else document_runs(document_ids)
        order = None if real is None else real.long().argsort(dim=1, stable=True)
        if order is not None:  # tokens without gaps between them, at the end of their row
            q, k, v = (_in_order(stream, order) for stream in (q, k, v))
            q, real = q[:, :, -time:], real.gather(1, order)
            document_ids = None if document_ids is None else document_ids.gather(1, order)
        is_whole = time == k.shape[2]
        way = self.options.training if self.training and is_whole else "hard"
        layout = self._layout(q, k, real, document_ids)
        y = self._attend(q, k, v, layout, way, auxiliary_losses)
        if order is not None:
            y = _in_order(y, order.argsort(dim=1))[:, :, -time:]
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _layout(
        self, q: Tensor, k: Tensor, real: Tensor | None, documents: Tensor | None
    ) -> BlockLayout:
        """Lay out blocks for queries that are the newest of the keys."""
        time, keys, block = q.shape[2], k.shape[2], self.options.block
        if time == keys:
            return sequence_blocks(time, block, documents, real, k.device)
        none = torch.zeros(1, dtype=torch.long, device=k.device)
        padding = none if real is None else (~real).sum(dim=1)
        return cached_blocks(keys - time, time, block, padding)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout,
        way: str,
        losses: list[Tensor] | None,
    ) -> Tensor:
        """Attend with [B, H, T, D] to keys and values [B, H, S, D]: [B, H, T, D]."""
        options = self.options
        carries = options.landmark_filter == "exponential"
        landmarks = landmark_keys(k, self._weights(k), layout, carries)
        dropout = options.dropout if self.training else 0.0
        scaling = 1 / math.sqrt(q.shape[3])
        sharpness = self.sharpness.exp() if options.is_sharp else math.sqrt(q.shape[3])
        if way in TAUGHT and losses is not None:
            given = (q, k, landmarks, layout, options.local, scaling, sharpness, ROWS)
            losses.append(guided_loss(*given))
        if way in DENSE:
            return attend_densely(q, k, v, layout, scaling, dropout, layout.documents is None)
        selected = choose_blocks(q, landmarks, layout, self.choice)
        given = (q, k, v, selected, layout, options.local, scaling, dropout)
        return attend_blocks("sdpa", *given)[0]

    def _weights(self, k: Tensor) -> Tensor:
        name = self.options.landmark_filter
        if name == "learned":
            return self.filter.clone()  # which an engine may take away after this forward
        return block_weights(name, self.options.block).to(k.device)


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """Put rows x [B, H, S or the newest T, D] in an order [B, S], zeros for what is not given."""
    batch, heads, time, width = x.shape
    missing = order.shape[1] - time
    if missing:
        x = torch.cat([x.new_zeros(batch, heads, missing, width), x], dim=2)
    return x.gather(2, order[:, None, :, None].expand_as(x))
