"""Hyena's filter network and layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cat_lm.mixers.base import Setting
from cat_lm.mixers.modules.context import short_convolution, without_padding
from cat_lm.mixers.modules.long_convolution import long_convolution

if TYPE_CHECKING:
    from cat_lm.mixers import hyena

FLOOR, FAST, SLOW = 1e-2, 0.3, 1.5  # the decay is at FLOOR after FAST ℓ to SLOW ℓ steps


class Sine(nn.Module):
    """sin(ω ⊙ x) with learned ω, 1 at the start."""

    no_decay = ("frequency",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.frequency * x).sin()


class FilterNetwork(nn.Module):
    """Four linear layers with sines between them, whose frequencies the layers share."""

    def __init__(self, features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, hidden) for n in (features, hidden, hidden))
        self.last, self.sine = nn.Linear(hidden, width, bias=False), Sine(hidden)

    def forward(self, z: Tensor) -> Tensor:
        for layer in self.layers:
            z = self.sine(layer(z))
        return self.last(z)


class Hyena(nn.Module):
    """One Hyena layer."""

    no_decay = ("short", "short_bias", "D")

    def __init__(self, options: hyena.Options, setting: Setting) -> None:
        super().__init__()
        width, hidden = setting.d_model, options.hidden
        self.options, bound = options, 1 / math.sqrt(options.window)
        self.in_proj = nn.Linear(width, 3 * width)
        self.short = nn.Parameter(torch.empty(1, 3 * width, options.window).uniform_(-bound, bound))
        self.short_bias = nn.Parameter(torch.empty(1, 3 * width).uniform_(-bound, bound))
        self.network = FilterNetwork(options.features, hidden, width)
        self.D = nn.Parameter(torch.randn(width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        x = short_convolution(
            *(self.in_proj(x)[:, :, None], self.short, self.short_bias),
            name="inputs",
            padding_mask=padding_mask,
        )
        after, before, v = x.squeeze(2).chunk(3, dim=-1)
        v = without_padding(before * v, padding_mask)
        return self.out_proj(after * (long_convolution(v, self.filters(x.shape[1])) + self.D * v))

    def filters(self, time: int) -> Tensor:
        """Make h [T, C], lag 0 first, in fp32 at least."""
        length, bands = self.options.length, (self.options.features - 1) // 2
        like = {"device": self.D.device, "dtype": torch.promote_types(self.D.dtype, torch.float32)}
        steps = torch.arange(time, device=self.D.device)[:, None].to(like["dtype"])
        frequencies = torch.linspace(1e-4, bands - 1, bands, **like)
        phases, fraction = 2 * math.pi / length * steps * frequencies, steps / (length - 1)
        features = torch.cat([fraction, phases.cos(), -phases.sin()], dim=-1)
        slow, fast = -math.log(FLOOR) / SLOW, -math.log(FLOOR) / FAST
        rates = torch.linspace(slow, fast, len(self.D), **like)
        return self.network(features.to(self.D.dtype)) * (-fraction * rates).exp()
