"""The module of the mixer multi-token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cat_lm.core.errors import UserError
from cat_lm.core.parameters import NothingDecays
from cat_lm.mixers.modules.attention import with_past
from cat_lm.mixers.modules.context import State, inputs_before
from cat_lm.ops.convolution.maps import places_of_real_keys
from cat_lm.ops.convolution.multi_token import identity_start, multi_token_attention
from cat_lm.ops.convolution.multi_token_options import length_problem
from cat_lm.ops.runtime.documents import document_positions, document_runs

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import multi_token


class MultiTokenAttention(NothingDecays):
    """One layer of multi-token attention."""

    def __init__(self, options: multi_token.Options, setting: Setting) -> None:
        super().__init__()
        self.options = options
        self.projection = nn.Linear(setting.d_model, 3 * setting.d_model, bias=options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)
        for name, values in identity_start(options.heads, **options.kernel).items():
            self.register_parameter(name, nn.Parameter(values))

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, self.options.heads, -1)).unbind(dim=2)
        earlier = inputs_before(q, self.options.query_window - 1, "q_inputs", padding_mask, state)
        q, k, v = (stream.transpose(1, 2) for stream in (q, k, v))
        real = padding_mask
        if state is not None:
            k, v, real = with_past(k, v, real, state)
        if problem := length_problem("mixer multi-token", k.shape[2]):
            raise UserError(problem)
        visible, positions, places = _layout(q, k, real, document_ids)
        if earlier is not None:
            ages = torch.arange(earlier.shape[1], 0, -1, device=x.device)
            seen = places[:, None] <= (positions[:, :1] - ages)[:, :, None]
            if real is not None:
                seen = seen & real[:, None]
            q = torch.cat([earlier.transpose(1, 2), q], dim=2)
            visible = torch.cat([seen.expand(len(visible), -1, -1), visible], dim=1)
        y, _ = multi_token_attention(
            q,
            k,
            v,
            self.kernel,
            getattr(self, "before", None),
            getattr(self, "after", None),
            visible=visible[:, None],
            positions=positions,
            scaling=q.shape[-1] ** -0.5,
            dropout=self.options.dropout if self.training else 0.0,
            place=None if real is None else places_of_real_keys(real),
        )
        return self.out_proj(y.flatten(2))


def _layout(
    q: Tensor, k: Tensor, real: Tensor | None, document_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what queries see, [B or 1, T, S], and queries' and keys' places, [B or 1, T or S].

    Positions leave padding out, and queries' count from 0 in every document.
    """
    time, keys = q.shape[2], k.shape[2]
    visible = torch.ones(time, keys, dtype=torch.bool, device=q.device).tril(keys - time)[None]
    places = torch.arange(keys, device=q.device)[None]
    if real is not None:
        # What is padding sees nothing, so that no later query reads its scores.
        visible = visible & real[:, None] & real[:, -time:, None]
        places = real.cumsum(dim=1) - real.long()
    if document_ids is None:
        return visible, places[:, -time:], places
    runs = document_runs(document_ids)
    visible = visible & (runs[:, :, None] == runs[:, None])
    positions = document_positions(document_ids)
    if real is not None:
        starts = torch.where(positions == 0, places, 0).cummax(dim=1).values
        positions = places - starts
    return visible, positions, places
