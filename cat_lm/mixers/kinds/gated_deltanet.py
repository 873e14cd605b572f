"""Gated DeltaNet (Yang et al., 2024): the delta rule on a state that decays.

As a mixer by name it has no output gate, as in Zoology's synthetic runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.mixers.kinds import deltanet
from cat_lm.mixers.parts.base import check_positive
from cat_lm.model.context import at_least_fp32
from cat_lm.ops.recurrence import backends


class GatedDeltaRule(deltanet.DeltaRule):
    """One layer of the delta rule with decays α = exp(−e^A softplus(a(x) + dt)) of each head.

    Arguments as of `DeltaRule`.
    """

    recurrence = backends.GATED_DELTA_RULE
    no_decay = ("A_log", "dt_bias")

    def __init__(self, width: int, heads: int, *sizes: int, **how: Any) -> None:
        super().__init__(width, heads, *sizes, **how)
        self.a_proj = nn.Linear(width, heads, bias=False)
        for name, values in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(values))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the published initial values by name: decay rates up to 16, step sizes from 0.001
        to 0.1.
        """
        rates = torch.empty(self.heads).uniform_(1e-3, 16)
        steps = 1e-3 * (torch.rand(self.heads) * math.log(100)).exp()
        return {"A_log": rates.log(), "dt_bias": steps + torch.log(-torch.expm1(-steps))}

    def rates(self, x: Tensor) -> list[Tensor]:
        """Compute β and log α = −e^{A_log} softplus(a + dt_bias), [B, T, H], in fp32 at least."""
        found = super().rates(x)
        steps = at_least_fp32(self.a_proj(x)) + at_least_fp32(self.dt_bias)
        # This is softplus; torch.compile assumes another memory layout of F.softplus' gradient.
        steps = torch.logaddexp(steps, torch.zeros_like(steps))
        return [*found, -at_least_fp32(self.A_log).exp() * steps]


@dataclass(frozen=True)
class Options(deltanet.Options):
    """Options of Gated DeltaNet.

    Attributes:
        expand_v: width of all values over C.
    """

    expand_v: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "expand_v")


class GatedDeltaNet(deltanet.DeltaNet):
    """The delta rule with decay."""

    name = "gated-deltanet"
    Options = Options
    rule = GatedDeltaRule

    def values(self, options: Options, width: int) -> int:
        return int(width * options.expand_v)


ENTRY = GatedDeltaNet()
