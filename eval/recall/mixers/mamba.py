"""Mamba (Gu and Dao, 2023): a selective state space model, in its own block without a second norm.

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t,   y_t = C_t h_t + D x_t

Published recall curves of Mamba were often made with a harness that re-initialised all linear
layers and set dt_proj.bias to 0, which undoes Mamba's spread of time scales. `init=zoology` does
the same; `init=own` keeps Mamba's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.ops import depthwise_conv
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from eval.recall.mixers import Setting

LAYERS = 2
BLOCK = "rms"
FASTEST, SLOWEST = 0.1, 1e-3  # Δ at the start


@dataclass(frozen=True)
class Options:
    """Options of Mamba.

    Attributes:
        state: numbers of state for each channel.
        window: W of its short convolution.
        expand: inner width over C.
        init: own, or zoology, which treats Mamba's linear layers as all others.
    """

    state: int = 16
    window: int = 4
    expand: int = 2
    init: str = "own"

    def __post_init__(self) -> None:
        if min(self.state, self.window, self.expand) < 1:
            raise ValueError("state, window and expand must be at least 1")
        if self.init not in ("own", "zoology"):
            raise ValueError(f"init={self.init!r}: must be own or zoology")


class SelectiveStateSpace(nn.Module):
    """One Mamba mixer."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        width, inner = setting.d_model, options.expand * setting.d_model
        self.rank, self.state = math.ceil(width / 16), options.state
        self.keeps_initialisation = options.init == "own"
        bound = 1 / math.sqrt(options.window)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.filters = nn.Parameter(torch.empty(1, inner, options.window).uniform_(-bound, bound))
        self.conv_bias = nn.Parameter(torch.empty(1, inner).uniform_(-bound, bound))
        self.x_proj = nn.Linear(inner, self.rank + 2 * options.state, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        rates = torch.arange(1, options.state + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(rates.log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        spread = torch.rand(inner) * math.log(FASTEST / SLOWEST)
        steps = SLOWEST * spread.exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus^{−1}
            self.out_proj.weight /= math.sqrt(setting.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(depthwise_conv(x[:, :, None], self.filters, self.conv_bias).squeeze(2))
        low_rank, b, c = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        delta = F.softplus(self.dt_proj(low_rank))
        y = selective_scan(x, delta, -self.A_log.exp(), b, c) + self.D * x
        return self.out_proj(y * F.silu(gate))


def selective_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y [B, T, I] for x, Δ [B, T, I], A [I, N], B and C [B, T, N]."""
    q, k, v = c[:, :, None], b[:, :, None], (delta * x)[:, :, None]
    return decaying_scan(q, k, v, delta[:, :, None, None], a.T[None]).squeeze(2)


def build(options: Options, setting: Setting) -> nn.Module:
    return SelectiveStateSpace(options, setting)
