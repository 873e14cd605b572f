"""A mixer of one's own: `model.mixer: leaky`, and `--mixer leaky` of `eval.recall run`.

    m_t = λ ⊙ m_{t−1} + (1 − λ) ⊙ W_in x_t,   y_t = W_out (SiLU(W_gate x_t) ⊙ m_t)

with a learned rate λ in (0, 1) for each channel. Decoding keeps m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers import MixerKind, Setting, register
from cat_lm.model.context import Context
from cat_lm.ops.recurrence.decaying_scan import decaying_scan


@dataclass(frozen=True)
class Options:
    """What follows the name, as in `leaky:memory=8`: the tokens that m remembers at first."""

    memory: float = 16.0

    def __post_init__(self) -> None:
        if self.memory <= 1:
            raise ValueError(f"memory={self.memory}: must be above 1")


class Leaky(MixerKind):
    """What there is to know before a model is made."""

    name = "leaky"
    Options = Options
    supports = frozenset({"documents", "padding", "state"})

    def build(self, options: Options, setting: Setting) -> nn.Module:
        return LeakyAverage(setting.d_model, options.memory)


class LeakyAverage(nn.Module):
    """One layer."""

    no_decay = ("rate",)

    def __init__(self, width: int, memory: float) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.rate = nn.Parameter(torch.logit(torch.full((width,), 1 - 1 / memory)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]."""
        new = (1 - self.rate.sigmoid()) * context.without_padding(self.in_proj(x))
        # One head with keys of one channel: S is m, which no step changes that is padding.
        step = context.without_padding(x.new_ones(*x.shape[:2], 1, 1))
        rate = F.logsigmoid(self.rate)[None, None]
        m = context.recur(decaying_scan, step, step, new[:, :, None], step[..., None], rate)
        return self.out_proj(F.silu(self.gate_proj(x)) * m.squeeze(2))


register(Leaky())
