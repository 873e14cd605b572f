"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored.

    S_t = S_{t−1} (I − β_t k_t k_t^T) + β_t v_t k_t^T,   o_t = S_t q_t / √d_k,   β = sigmoid(b(x))

with short convolutions of queries, keys and values, SiLU, unit queries and keys, and RMSNorm of
each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.linear import GatedNorm, LinearMixer, Operator
from cat_lm.mixers.parts.options import DeltaOptions, check_operator
from cat_lm.model.context import Context, at_least_fp32
from cat_lm.model.sequence import to_heads, to_tokens
from cat_lm.ops.recurrence import backends, fla
from cat_lm.ops.recurrence.delta_rule import delta_rule


class DeltaRule(LinearMixer):
    """One layer of the delta rule; arguments as of `LinearMixer`.

    Attributes:
        unit_epsilon: what is added to the square of the length of queries and keys.
    """

    recurrence = backends.DELTA_RULE
    unit_epsilon = 1e-6

    def __init__(
        self,
        width: int,
        heads: int,
        keys: int,
        values: int,
        *,
        norm_eps: float,
        is_gated: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(width, heads, keys, values, is_gated=is_gated, **how)
        self.is_gated = is_gated
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.o_norm = (GatedNorm if is_gated else nn.RMSNorm)(values // heads, norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]."""
        q, k, v = to_heads(context.group, *self.streams(x, context))
        # Without β and a decay a step leaves the state as it was.
        rates = [context.without_padding(rate) for rate in self.rates(x)]
        rates = [own for rate in rates for own in to_heads(context.group, rate)]
        q, k = self._unit(q), self._unit(k)
        y = context.recur(self.operator(v, context.mixer_backend), q, k, v, *rates)
        y = to_tokens(context.group, y)
        gate = [self.of_heads(self.g_proj(x))] if self.is_gated else []
        return self.o_proj(self.o_norm(y, *gate).flatten(2))

    def rates(self, x: Tensor) -> list[Tensor]:
        """Compute β, and the logarithm of the decay where there is one, [B, T, H]."""
        return [self.b_proj(x).sigmoid()]

    def computed_by(self, backend: str) -> Operator:
        return fla.chunked_delta_rule if backend == "fla" else delta_rule

    def _unit(self, x: Tensor) -> Tensor:
        """Scale each head to length 1: x / √(Σ x² + ε)."""
        wide = at_least_fp32(x)
        squares = wide.square().sum(-1, keepdim=True)
        return (wide * (squares + self.unit_epsilon).rsqrt()).to(x.dtype)


def make_rule(
    rule: type[DeltaRule], options: DeltaOptions, width: int, values: int, operator: Operator
) -> DeltaRule:
    """Make the layer of a mixer by name: as in Zoology, with the streams that its options say."""
    layer = rule(width, options.heads, width, values, norm_eps=1e-5)
    layer.own_operator = operator
    layer.unit_epsilon = 1e-24  # of the square of a length, as `F.normalize` has it
    layer.filter_streams(options)
    return layer


@dataclass(frozen=True)
class Options(DeltaOptions):
    """Options of DeltaNet: those of both delta-rule layers, and its own.

    Attributes:
        operator: torch, or fla, flash-linear-attention's on a GPU, see
            cat_lm/ops/recurrence/fla.py.
    """

    operator: str = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_operator(self)


class DeltaNet(MixerKind):
    """The delta rule."""

    name = "deltanet"
    Options = Options
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        options.check(setting.d_model, setting.d_model)

    def build(self, options: Options, setting: Setting) -> nn.Module:
        operator = fla.delta_rule if options.operator == "fla" else delta_rule
        return make_rule(DeltaRule, options, setting.d_model, setting.d_model, operator)


ENTRY = DeltaNet()
