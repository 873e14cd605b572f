"""Based's two layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cat_lm.mixers.modules.context import State, short_convolution
from cat_lm.mixers.modules.linear_attention import linear_attention

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import based


class GatedShortConvolution(nn.Module):
    """(conv u) ⊙ (W u + b) + u, with a depthwise causal convolution."""

    no_decay = ("filters", "bias")

    def __init__(self, options: based.Options, setting: Setting) -> None:
        super().__init__()
        width, bound = setting.d_model, 1 / math.sqrt(options.window)
        self.filters = nn.Parameter(torch.empty(1, width, options.window).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1, width).uniform_(-bound, bound))
        self.projection = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        moved = short_convolution(x[:, :, None], self.filters, self.bias, name="inputs", **how)
        moved = moved.squeeze(2)
        return moved * self.projection(x) + x


class TaylorAttention(nn.Module):
    """Linear attention with φ(q)·φ(k) = 1 + s + s²/2, s = q·k/√f."""

    def __init__(self, options: based.Options, setting: Setting) -> None:
        super().__init__()
        width = setting.d_model
        self.features = options.features
        self.qk_proj = nn.Linear(width, 2 * options.features, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        q, k = (self._map(part) for part in self.qk_proj(x).chunk(2, dim=-1))
        v = self.v_proj(x)[:, :, None]
        y = linear_attention(q[:, :, None], k[:, :, None], v, **how)
        return self.o_proj(y.squeeze(2))

    def _map(self, x: Tensor) -> Tensor:
        x = x / self.features**0.25
        second = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, second], dim=-1)
