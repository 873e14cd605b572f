"""Based: a gated short convolution in even layers, Taylor linear attention in odd ones.

As Zoology's hybrid of its synthetic runs (Arora et al., 2024): layer i is entry i mod 2 of (short
convolution, attention), so that Based with one layer has no attention at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting, check_counts
from cat_lm.mixers.parts.linear import linear_attention
from cat_lm.model.context import Context
from cat_lm.model.streams.short_convolution import convolve_channels


@dataclass(frozen=True)
class Options:
    """Options of Based.

    Attributes:
        features: f, channels of queries and keys before the feature map.
        window: W of the short convolution.
    """

    features: int = 8
    window: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "features", "window")


class GatedShortConvolution(nn.Module):
    """(conv u) ⊙ (W u + b) + u, with a depthwise causal convolution."""

    no_decay = ("filters", "bias")

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        width, bound = setting.d_model, 1 / math.sqrt(options.window)
        self.filters = nn.Parameter(torch.empty(1, width, options.window).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1, width).uniform_(-bound, bound))
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        moved = convolve_channels(x, self.filters, self.bias, context, name="inputs")
        return moved * self.projection(x) + x


class TaylorAttention(nn.Module):
    """Linear attention with φ(q)·φ(k) = 1 + s + s²/2, s = q·k/√f."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        width = setting.d_model
        self.features = options.features
        self.qk_proj = nn.Linear(width, 2 * options.features, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k = (self._map(part) for part in self.qk_proj(x).chunk(2, dim=-1))
        v = self.v_proj(x)[:, :, None]
        y = linear_attention(q[:, :, None], k[:, :, None], v, context)
        return self.o_proj(y.squeeze(2))

    def _map(self, x: Tensor) -> Tensor:
        x = x / self.features**0.25
        second = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, second], dim=-1)


class Based(MixerKind):
    """Short convolutions and linear attention in alternating layers."""

    name = "based"
    Options = Options
    supports = ALL

    def build(self, options: Options, setting: Setting) -> nn.Module:
        kind = TaylorAttention if setting.layer % 2 else GatedShortConvolution
        return kind(options, setting)


ENTRY = Based()
