"""The module of `attention: multi_token`: kernels, head mixing, and the cached last queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import repeat_kv

from cat_lm.core.errors import UserError
from cat_lm.core.parameters import NothingDecays
from cat_lm.model.attention.modules.call import AttentionCall, visible_keys
from cat_lm.ops.convolution.maps import places_of_real_keys
from cat_lm.ops.convolution.multi_token import identity_start, multi_token_attention
from cat_lm.ops.convolution.multi_token_options import length_problem
from cat_lm.ops.runtime.documents import document_positions


class MultiTokenCore(NothingDecays):
    """Multi-token attention by `cat_lm.ops.convolution.multi_token`.

    Parameters, which start as softmax attention: `kernel` [H, c_q, c_k], and `before` and `after`
    [H, H] where heads are mixed. More keys than the exact form is for raise `UserError`.
    """

    def __init__(self, heads: int, options: dict[str, Any]):
        super().__init__()
        self.heads, self.options = heads, options
        for name, values in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(values))

    def initial_values(self) -> dict[str, Tensor]:
        return identity_start(self.heads, **self.options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: None, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        if problem := length_problem("attention=multi_token", key.shape[2]):
            raise UserError(problem)
        visible = visible_keys(call.mask, query, key)
        if visible is None:
            visible = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
        place = places_of_real_keys(visible[:, 0, -1]) if call.continues else None
        # Position ids may continue across a document's start.
        packed = call.documents is not None
        positions = document_positions(call.documents) if packed else call.query_positions
        query, visible = self._with_earlier(query, visible, call)
        groups = query.shape[1] // key.shape[1]
        streams = query, repeat_kv(key, groups), repeat_kv(value, groups)
        mixing = getattr(self, "before", None), getattr(self, "after", None)
        how = {"scaling": call.scaling, "dropout": call.dropout, "place": place}
        return multi_token_attention(
            *streams, self.kernel, *mixing, visible=visible, positions=positions, **how
        )

    def _with_earlier(
        self, query: Tensor, visible: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Return the last c_q − 1 queries with the new ones, and the keys visible to each."""
        past = self.kernel.shape[1] - 1
        if call.state is None or not past:
            return query, visible
        earlier = call.state.exchange_inputs(
            "multi_token_query", query.transpose(1, 2), past + 1, call.padding
        )
        # Positions skip padding: an earlier query saw the keys up to its own position.
        ages = torch.arange(past, 0, -1, device=query.device)
        newest = call.query_positions[:, :1] - ages  # [B or 1, past]
        seen = call.key_positions[:, None, :] <= newest[:, :, None]
        seen = (visible[:, :, :1] & seen[:, None]).expand(len(visible), -1, -1, -1)
        return torch.cat([earlier.transpose(1, 2), query], dim=2), torch.cat([seen, visible], dim=2)
