"""Gated linear attention (Yang et al., 2023): each key channel decays as the input says.

    S_t = diag(α_t) S_{t−1} + k_t v_t^T,   o_t = S_t^T q_t / √d_k,   α = sigmoid(low rank)^{1/16}

then RMSNorm of each head, a swish output gate and a projection. As a mixer by name it has no short
convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts import base
from cat_lm.mixers.parts.linear import GatedNorm, LinearMixer, Operator
from cat_lm.model.context import Context, at_least_fp32
from cat_lm.model.sequence import to_heads, to_tokens
from cat_lm.ops.recurrence import GLA_LOW_RANK, backends, fla
from cat_lm.ops.recurrence.decaying_scan import decaying_scan

TEMPERATURE = 16


class GatedLinearAttention(LinearMixer):
    """One layer of gated linear attention; arguments as of `LinearMixer`."""

    recurrence = backends.GLA

    def __init__(
        self, width: int, heads: int, keys: int, values: int, *, norm_eps: float, **how: Any
    ) -> None:
        super().__init__(width, heads, keys, values, **how)
        self.gk_proj = nn.Sequential(
            nn.Linear(width, GLA_LOW_RANK, bias=False), nn.Linear(GLA_LOW_RANK, keys)
        )
        self.g_norm_swish_gate = GatedNorm(values // heads, norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        gates = self.of_heads(self.gk_proj(x))
        q, k, v, gates = to_heads(context.group, *self.streams(x, context), gates)
        decay = F.logsigmoid(at_least_fp32(gates)) / TEMPERATURE
        # At padding, key and decay are zero, so that the step leaves the state unchanged.
        k, decay = context.without_padding(k), context.without_padding(decay)
        y = context.recur(self.operator(v, context.mixer_backend), q, k, v, decay)
        y = to_tokens(context.group, y)
        y = self.g_norm_swish_gate(y, self.of_heads(self.g_proj(x)))
        return self.o_proj(y.flatten(2))

    def computed_by(self, backend: str) -> Operator:
        if backend == "fla":
            return fla.chunked_gated_linear_attention
        return partial(gated_linear_attention, backend=backend)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **how: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute o [B, T, H, V] for q, k, log α [B, T, H, K] and v [B, T, H, V].

    Args:
        how: document_ids, initial_state, return_state and backend, as of `decaying_scan`.
    """
    one = log_decay.new_ones(1, 1, 1)
    return decaying_scan(q * q.shape[-1] ** -0.5, k, v, log_decay[..., None], one, **how)


@dataclass(frozen=True)
class Options:
    """Options of GLA.

    Attributes:
        heads: H.
        expand_k: width of all keys over C.
        expand_v: width of all values over C.
    """

    heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0

    def __post_init__(self) -> None:
        base.check_counts(self, "heads")
        base.check_positive(self, "expand_k", "expand_v")

    def sizes(self, width: int) -> tuple[int, int]:
        return int(width * self.expand_k), int(width * self.expand_v)


class Gla(base.MixerKind):
    """Linear attention whose state decays."""

    name = "gla"
    Options = Options
    supports = base.ALL

    def check(self, options: Options, setting: base.Setting) -> None:
        keys, values = options.sizes(setting.d_model)
        base.check_heads(options.heads, f"{keys} keys, {values} values", keys, values)

    def build(self, options: Options, setting: base.Setting) -> nn.Module:
        sizes = options.sizes(setting.d_model)
        layer = GatedLinearAttention(setting.d_model, options.heads, *sizes, norm_eps=1e-5)
        layer.is_by_name = True
        return layer


ENTRY = Gla()
