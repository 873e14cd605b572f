"""The layer around the (gated) delta rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.ops import depthwise_conv
from cat_lm.ops.recurrence.delta_rule import delta_rule
from eval.recall.mixers import Setting

STREAMS = "qkv"


@dataclass(frozen=True)
class DeltaOptions:
    """Options of both delta-rule layers.

    Attributes:
        streams: which of q, k, v pass a depthwise short convolution; none: none of them. SiLU
            follows on all three in any case.
        window: W of the short convolutions.
        heads: H.
        shared_kv: whether keys and values have one projection, K = V before the convolutions;
            needs values as wide as keys.
    """

    streams: str | None = STREAMS
    window: int = 4
    heads: int = 2
    shared_kv: bool = False

    def __post_init__(self) -> None:
        streams = self.streams or ""
        if len(set(streams)) != len(streams) or not set(streams) <= set(STREAMS):
            raise ValueError(f"streams={self.streams!r}: must be any of q, k, v, or none")
        if self.window < 1 or self.heads < 1:
            raise ValueError("window and heads must be at least 1")


class DeltaRuleLayer(nn.Module):
    """Short convolutions with SiLU, unit-norm queries and keys, the delta rule, RMSNorm of heads.

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
        self.operator = operator or delta_rule
        width, heads = setting.d_model, options.heads
        values = int(width * expand_v)
        if width % heads or values % heads or values < 1:
            raise ValueError(f"heads={heads} do not divide {width} keys, {values} values")
        if options.shared_kv and values != width:
            raise ValueError(f"shared_kv=true: {values} values but {width} keys; set expand_v=1")
        self.heads, self.gated = heads, gated
        self.projected = {"q": "q", "k": "k", "v": "k" if options.shared_kv else "v"}
        sizes = {"q": width, "k": width, "v": values}
        different = dict.fromkeys(self.projected.values())
        self.projections = nn.ModuleDict(
            {s: nn.Linear(width, sizes[s], bias=False) for s in different}
        )
        bound = 1 / math.sqrt(options.window)
        self.filters = nn.ParameterDict(
            {
                s: nn.Parameter(torch.empty(1, size, options.window).uniform_(-bound, bound))
                for s, size in sizes.items()
                if s in (options.streams or "")
            }
        )
        self.b_proj = nn.Linear(width, heads, bias=False)
        if gated:
            self.a_proj = nn.Linear(width, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads).uniform_(1e-3, 16).log())
            steps = 1e-3 * (torch.rand(heads) * math.log(100)).exp()
            self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.norm = nn.RMSNorm(values // heads, eps=1e-5)
        self.o_proj = nn.Linear(values, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._stream(s, x).unflatten(-1, (self.heads, -1)) for s in STREAMS)
        rates = [self.b_proj(x).sigmoid()]
        if self.gated:
            rates.append(-self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias))
        y = self.operator(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, *rates)
        return self.o_proj(self.norm(y).flatten(2))

    def _stream(self, name: str, x: Tensor) -> Tensor:
        x = self.projections[self.projected[name]](x)
        if name in self.filters:
            x = depthwise_conv(x[:, :, None], self.filters[name]).squeeze(2)
        return F.silu(x)
