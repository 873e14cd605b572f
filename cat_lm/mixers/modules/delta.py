"""The layer around the (gated) delta rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.parameters import NothingDecays
from cat_lm.mixers.modules.context import (
    State,
    at_least_fp32,
    from_state,
    short_convolution,
    without_padding,
)
from cat_lm.mixers.modules.projections import Filters, activate, initial_filters
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.recurrence.delta_rule import delta_rule

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.shared import DeltaOptions


class DeltaRuleLayer(NothingDecays):
    """Short convolutions, SiLU, unit-norm queries and keys, the delta rule, RMSNorm of heads.

    Filters of one filter a channel are those of one wide head, [1, C, W].

    Args:
        expand_v: width of all values over C.
        gated: whether the state decays, α = exp(−e^A softplus(a(x) + dt)).
        operator: what computes the rule; none: `delta_rule`.
    """

    def __init__(
        self,
        options: DeltaOptions,
        setting: Setting,
        expand_v: float,
        gated: bool,
        operator: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.operator, self.options = operator or delta_rule, options
        width, heads = setting.d_model, options.heads
        self.heads, self.gated = heads, gated
        self.projected = {"q": "q", "k": "k", "v": "k" if options.shared_kv else "v"}
        sizes = options.sizes(width, expand_v)
        values = sizes["v"]
        different = dict.fromkeys(self.projected.values())
        self.projections = nn.ModuleDict(
            {s: nn.Linear(width, sizes[s], bias=False) for s in different}
        )
        self.groups = 1 if options.conv_type == kinds.DEPTHWISE.name else heads
        self.filters = Filters(
            options.conv_type,
            {
                s: nn.Parameter(initial_filters(options, self.groups, size // self.groups))
                for s, size in sizes.items()
                if s in (options.streams or "")
            },
        )
        self.b_proj = nn.Linear(width, heads, bias=False)
        if gated:
            self.a_proj = nn.Linear(width, heads, bias=False)
            for name, start in initial_decay(heads).items():
                self.register_parameter(name, nn.Parameter(start))
        self.norm = nn.RMSNorm(values // heads, eps=1e-5)
        self.o_proj = nn.Linear(values, width, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "state": state}
        streams = (self._stream(s, x, padding_mask=padding_mask, **how) for s in STREAMS)
        q, k, v = (s.unflatten(-1, (self.heads, -1)) for s in streams)
        rates = [self.b_proj(x).sigmoid()]
        if self.gated:
            rates.append(log_decay(self.a_proj(x), self.dt_bias, self.A_log))
        # Without β and a decay a step leaves the state as it was.
        rates = [without_padding(rate, padding_mask) for rate in rates]
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y = from_state(self.operator, q, k, v, *rates, **how)
        return self.o_proj(self.norm(y).flatten(2))

    def _stream(self, name: str, x: Tensor, **how: Tensor | State | None) -> Tensor:
        x = self.projections[self.projected[name]](x)
        if name in self.filters:
            x = short_convolution(
                *(x.unflatten(-1, (self.groups, -1)), self.filters[name]),
                name=f"{name}_inputs",
                conv_type=self.options.conv_type,
                **how,
            ).flatten(2)
        return activate(self.options, x)


def log_decay(a: Tensor, dt_bias: Tensor, A_log: Tensor) -> Tensor:
    """Compute log α = −e^{A_log} softplus(a + dt_bias), [B, T, H], in fp32 at least."""
    steps = at_least_fp32(a) + at_least_fp32(dt_bias)
    # Softplus; of F.softplus, torch.compile takes the gradient to lie otherwise than it does.
    steps = torch.logaddexp(steps, torch.zeros_like(steps))
    return -at_least_fp32(A_log).exp() * steps


def initial_decay(heads: int) -> dict[str, Tensor]:
    """Draw `A_log` and `dt_bias` [H] as they start: rates to 16, steps from 0.001 to 0.1."""
    rates = torch.empty(heads).uniform_(1e-3, 16)
    steps = 1e-3 * (torch.rand(heads) * math.log(100)).exp()
    return {"A_log": rates.log(), "dt_bias": steps + torch.log(-torch.expm1(-steps))}
