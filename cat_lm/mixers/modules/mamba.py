"""Mamba's selective state space layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import (
    State,
    at_least_fp32,
    from_state,
    short_convolution,
    without_padding,
)
from cat_lm.ops.recurrence.decaying_scan import decaying_scan

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import mamba

FASTEST, SLOWEST = 0.1, 1e-3  # Δ at the start


class SelectiveStateSpace(nn.Module):
    """One Mamba mixer."""

    no_decay = ("filters", "conv_bias", "A_log", "D")

    def __init__(self, options: mamba.Options, setting: Setting) -> None:
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
        self.A_log = nn.Parameter(rates.log().to(self.in_proj.weight.dtype).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        spread = torch.rand(inner) * math.log(FASTEST / SLOWEST)
        steps = SLOWEST * spread.exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus^{−1}
            self.out_proj.weight /= math.sqrt(setting.num_layers)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "state": state}
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = short_convolution(
            *(x[:, :, None], self.filters, self.conv_bias),
            name="inputs",
            padding_mask=padding_mask,
            **how,
        )
        x = F.silu(x.squeeze(2))
        low_rank, b, c = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        # A step of no length leaves the state as it was.
        delta = F.softplus(at_least_fp32(self.dt_proj(low_rank)))
        delta = without_padding(delta, padding_mask)
        a = -at_least_fp32(self.A_log).exp()
        y = from_state(selective_scan, x, delta, a, b, c, **how) + self.D * x
        return self.out_proj(y * F.silu(gate))


def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, **how: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute y [B, T, I] for x, Δ [B, T, I], A [I, N], B and C [B, T, N].

    Args:
        how: document_ids, initial_state, return_state and backend, as of `decaying_scan`; a state
            is [B, 1, N, I].
    """
    q, k, v = c[:, :, None], b[:, :, None], (delta * x)[:, :, None]
    found = decaying_scan(q, k, v, delta[:, :, None, None], a.T[None], **how)
    if how.get("return_state"):
        return found[0].squeeze(2).to(x.dtype), found[1]
    return found.squeeze(2).to(x.dtype)
