"""Hyena (Poli et al., 2023) of order 2: a gated long convolution, its filter made by a network.

    (x₁, x₂, v) = short depthwise convolution of W x + b,   y = W_o (x₂ ⊙ (h * (x₁ ⊙ v) + D x₁ ⊙ v))
    h_t = MLP(z_t) ⊙ exp(−t/(ℓ−1) δ),   z_t = (t/(ℓ−1), cos f 2πt/ℓ, −sin f 2πt/ℓ for each f)

as in Zoology: sines with one learned frequency for each unit, shared by the network's layers, three
features and no floor under the decay, whose rates δ run from ln 100 / 1.5 to ln 100 / 0.3 over the
channels. There z is learned too, one row a position, and ends at the trained length ℓ; here it is
the function of time that it starts as, so that longer sequences have a filter: it goes on decaying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cat_lm.ops import depthwise_conv
from eval.recall.mixers import Setting
from eval.recall.mixers._long_convolution import long_convolution

LAYERS = 2
FLOOR, FAST, SLOW = 1e-2, 0.3, 1.5  # the decay is at FLOOR after FAST ℓ to SLOW ℓ steps


@dataclass(frozen=True)
class Options:
    """Options of Hyena.

    Attributes:
        length: ℓ, the unit of time of the filter; Zoology's is the length of its sequences.
        window: W of the short convolutions.
        hidden: width of the filter's network.
        features: of time, odd: the time and pairs of waves.
    """

    length: int = 128
    window: int = 3
    hidden: int = 64
    features: int = 3

    def __post_init__(self) -> None:
        if self.length < 2 or self.window < 1 or self.hidden < 1:
            raise ValueError("length must be at least 2, window and hidden at least 1")
        if self.features < 3 or self.features % 2 == 0:
            raise ValueError(f"features={self.features}: must be odd and at least 3")


class Sine(nn.Module):
    """sin(ω ⊙ x) with learned ω, 1 at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.frequency * x).sin()


class Hyena(nn.Module):
    """One Hyena layer."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        width, hidden, sine = setting.d_model, options.hidden, Sine(options.hidden)
        self.options, bound = options, 1 / math.sqrt(options.window)
        self.in_proj = nn.Linear(width, 3 * width)
        self.short = nn.Parameter(torch.empty(1, 3 * width, options.window).uniform_(-bound, bound))
        self.short_bias = nn.Parameter(torch.empty(1, 3 * width).uniform_(-bound, bound))
        self.network = nn.Sequential(
            *(nn.Linear(options.features, hidden), sine),
            *(nn.Linear(hidden, hidden), sine, nn.Linear(hidden, hidden), sine),
            nn.Linear(hidden, width, bias=False),
        )
        rates = torch.linspace(-math.log(FLOOR) / SLOW, -math.log(FLOOR) / FAST, width)
        self.register_buffer("rates", rates, persistent=False)
        self.D = nn.Parameter(torch.randn(width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = depthwise_conv(self.in_proj(x)[:, :, None], self.short, self.short_bias).squeeze(2)
        after, before, v = x.chunk(3, dim=-1)
        v = before * v
        return self.out_proj(after * (long_convolution(v, self.filters(x.shape[1])) + self.D * v))

    def filters(self, time: int) -> Tensor:
        """h [T, C], lag 0 first."""
        length, bands = self.options.length, (self.options.features - 1) // 2
        steps = torch.arange(time, device=self.rates.device)[:, None].to(self.rates.dtype)
        frequencies = torch.linspace(1e-4, bands - 1, bands, device=steps.device, dtype=steps.dtype)
        phases, fraction = 2 * math.pi / length * steps * frequencies, steps / (length - 1)
        features = torch.cat([fraction, phases.cos(), -phases.sin()], dim=-1)
        return self.network(features) * (-fraction * self.rates).exp()


def build(options: Options, setting: Setting) -> nn.Module:
    return Hyena(options, setting)
