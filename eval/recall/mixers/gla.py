"""Gated linear attention (Yang et al., 2023): each key channel decays as the input says.

    S_t = diag(α_t) S_{t−1} + k_t v_t^T,   o_t = S_t^T q_t / √d_k,   α = sigmoid(low rank)^{1/16}

then RMSNorm of each head, a swish output gate and a projection; no short convolution by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.ops.recurrence import fla
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.recurrence.fla import check_operator
from eval.recall.mixers import Setting

LAYERS = 2
LOW_RANK, TEMPERATURE = 16, 16


@dataclass(frozen=True)
class Options:
    """Options of GLA.

    Attributes:
        heads: H.
        expand_k: width of all keys over C.
        expand_v: width of all values over C.
        operator: torch, our own scan, or fla, flash-linear-attention's on a GPU, see
            cat_lm/ops/recurrence/fla.py.
    """

    heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0
    operator: str = "torch"

    def __post_init__(self) -> None:
        check_operator(self.operator)
        for name in ("expand_k", "expand_v"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a number above 0")


class GatedLinearAttention(nn.Module):
    """One GLA layer."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        width, self.heads = setting.d_model, options.heads
        of_package = options.operator == "fla"
        self.operator = fla.gated_linear_attention if of_package else gated_linear_attention
        keys, values = int(width * options.expand_k), int(width * options.expand_v)
        if (
            options.heads < 1
            or min(keys, values) < 1
            or keys % options.heads
            or values % options.heads
        ):
            raise ValueError(f"heads={options.heads} do not divide {keys} keys, {values} values")
        self.q_proj = nn.Linear(width, keys, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        self.g_proj = nn.Linear(width, values, bias=False)
        self.decay_proj = nn.Sequential(
            nn.Linear(width, LOW_RANK, bias=False), nn.Linear(LOW_RANK, keys)
        )
        self.norm = nn.RMSNorm(values // options.heads, eps=1e-5)
        self.o_proj = nn.Linear(values, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        decay = F.logsigmoid(self.decay_proj(x)) / TEMPERATURE
        streams = (self.q_proj(x), self.k_proj(x), self.v_proj(x), decay)
        y = self.operator(*(s.unflatten(-1, (self.heads, -1)) for s in streams))
        return self.o_proj(self.norm(y).flatten(2) * F.silu(self.g_proj(x)))


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """o [B, T, H, V] for q, k, log α [B, T, H, K] and v [B, T, H, V]."""
    one = log_decay.new_ones(1, 1, 1)
    return decaying_scan(q * q.shape[-1] ** -0.5, k, v, log_decay[..., None], one)


def build(options: Options, setting: Setting) -> nn.Module:
    return GatedLinearAttention(options, setting)
