"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored.

    S_t = S_{t−1} (I − β_t k_t k_t^T) + β_t v_t k_t^T,   o_t = S_t q_t / √d_k,   β = sigmoid(b(x))

with short convolutions of queries, keys and values, SiLU, unit queries and keys, and RMSNorm of
each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from cat_lm.mixers.parts.base import ALL, FilterOptions, MixerKind, Setting, check_heads
from cat_lm.mixers.parts.linear import GatedNorm, LinearMixer, Operator
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
        q, k, v = to_heads(context.group, *self.streams(x, context))
        # At padding, β and the decay are zero, so that the step leaves the state unchanged.
        rates = [context.without_padding(rate) for rate in self.rates(x)]
        rates = [own for rate in rates for own in to_heads(context.group, rate)]
        q, k = self._unit(q), self._unit(k)
        y = context.recur(self.operator(v, context.mixer_backend), q, k, v, *rates)
        y = to_tokens(context.group, y)
        gate = [self.of_heads(self.g_proj(x))] if self.is_gated else []
        return self.o_proj(self.o_norm(y, *gate).flatten(2))

    def rates(self, x: Tensor) -> list[Tensor]:
        """Return β and, if there is one, the logarithm of the decay, both [B, T, H]."""
        return [self.b_proj(x).sigmoid()]

    def computed_by(self, backend: str) -> Operator:
        return fla.chunked_delta_rule if backend == "fla" else delta_rule

    def _unit(self, x: Tensor) -> Tensor:
        """Scale each head to length 1: x / √(Σ x² + ε)."""
        wide = at_least_fp32(x)
        squares = wide.square().sum(-1, keepdim=True)
        return (wide * (squares + self.unit_epsilon).rsqrt()).to(x.dtype)


@dataclass(frozen=True)
class Options(FilterOptions):
    """Options of both delta-rule layers: those of filters, with other defaults.

    Attributes:
        activation: silu, of all three streams whether convolved or not, or none.
        shared_kv: needs values as wide as keys.
    """

    window: int = 4
    conv_type: str = "depthwise"
    activation: str = "silu"
    heads: int = 2


class DeltaNet(MixerKind):
    """The delta rule with optional convolved streams, as in Zoology."""

    name = "deltanet"
    Options = Options
    supports = ALL
    rule: ClassVar[type[DeltaRule]] = DeltaRule

    def values(self, options: Any, width: int) -> int:
        return width

    def check(self, options: Any, setting: Setting) -> None:
        keys, values = setting.d_model, self.values(options, setting.d_model)
        check_heads(options.heads, f"{keys} keys, {values} values", keys, values)
        if options.shared_kv and values != keys:
            raise ValueError(f"shared_kv=true: {values} values but {keys} keys; set expand_v=1")

    def build(self, options: Any, setting: Setting) -> nn.Module:
        width, values = setting.d_model, self.values(options, setting.d_model)
        layer = self.rule(width, options.heads, width, values, norm_eps=1e-5)
        layer.unit_epsilon = 1e-24  # The epsilon of the squared norm, as in `F.normalize`.
        layer.filter_streams(options)
        return layer


ENTRY = DeltaNet()
