"""Mamba (Gu and Dao, 2023): a selective state space model, in its own block without a second norm.

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t,   y_t = C_t h_t + D x_t

between a short convolution and a gate. Step sizes, decays and states are computed in fp32 whatever
the precision.

Published recall curves of Mamba were often made with a harness that re-initialised all linear
layers and set dt_proj.bias to 0, which undoes Mamba's spread of time scales. As a mixer by name,
`init=zoology` does the same; `init=own` keeps Mamba's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.initial_steps import Starts
from cat_lm.mixers.parts.options import check_choice, check_counts
from cat_lm.model.context import Context, at_least_fp32
from cat_lm.model.sequence import own_heads, to_heads, to_sequence, to_tokens
from cat_lm.model.streams.short_convolution import ShortConvolution
from cat_lm.ops.recurrence.decaying_scan import decaying_scan


class StepProjection(nn.Linear):
    """The projection to Δ before its softplus, whose bias is added in fp32.

    The bias sets time scales over two orders of magnitude, which bf16 would round.
    """

    def forward(self, low_rank: Tensor) -> Tensor:
        return at_least_fp32(F.linear(low_rank, self.weight)) + at_least_fp32(self.bias)


class MambaMixer(nn.Module):
    """The selective state space of a layer, with the names of transformers' Mamba.

    Args:
        width: C.
        inner: I, the channels inside the layer.
        states: N, numbers of state for each of them.
        window: W of the short convolution.
        rank: of the projection to Δ; None: a sixteenth of C.
        bias: of the first and the last projection.
        conv_bias: of the short convolution.
        starts: of the parameters.
    """

    no_decay = ("A_log", "D")

    def __init__(
        self,
        width: int,
        inner: int,
        states: int,
        window: int,
        rank: int | None = None,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        starts: Starts,
    ) -> None:
        super().__init__()
        self.starts = starts
        rank = math.ceil(width / 16) if rank is None else rank
        self.sizes = [rank, states, states]
        as_torch = starts.by != "family"
        self.in_proj = nn.Linear(width, 2 * inner, bias=bias)
        self.conv1d = ShortConvolution(inner, window, conv_bias, starts_as_torch=as_torch)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = StepProjection(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, states))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, width, bias=bias)
        self.keeps_initialisation = starts.by == "torch"
        if as_torch:
            with torch.no_grad():
                for name, values in self._first_values().items():
                    self.get_parameter(name).copy_(values)

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the parameters start from, by name; the other projections' start is usual."""
        return self._first_values() if self.starts.by == "family" else {}

    def _first_values(self) -> dict[str, Tensor]:
        inner, states = self.A_log.shape
        bound = self.sizes[0] ** -0.5
        return {
            "A_log": torch.arange(1.0, states + 1).log().expand(inner, -1),
            "D": torch.ones(inner),
            "dt_proj.weight": torch.empty_like(self.dt_proj.weight).uniform_(-bound, bound),
            "dt_proj.bias": self.starts.steps(inner),
            "out_proj.weight": self.starts.output(self.out_proj.weight),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]."""
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv1d(x, context)
        low_rank, b, c = self.x_proj(x).split(self.sizes, dim=-1)
        # A step of no length leaves the state as it was.
        delta = context.without_padding(F.softplus(self.dt_proj(low_rank)))
        a = -at_least_fp32(self.A_log).exp()
        scan = functools.partial(selective_scan, backend=context.mixer_backend)
        group = context.group
        (own,), (delta,) = to_heads(group, x), to_heads(group, delta)  # channels are heads here
        b, c = to_sequence(group, b), to_sequence(group, c)
        y = context.recur(scan, own, delta, own_heads(group, a), b, c)
        y = to_tokens(group, y) + self.D * x
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
        check_counts(self, "state", "window", "expand")
        check_choice(self, "init", ("own", "zoology"))


class Mamba(MixerKind):
    """The selective state space model."""

    name = "mamba"
    Options = Options
    block = "rms"
    supports = ALL

    def build(self, options: Options, setting: Setting) -> nn.Module:
        starts = Starts(
            layers=setting.num_layers, by="torch" if options.init == "own" else options.init
        )
        width, inner = setting.d_model, options.expand * setting.d_model
        return MambaMixer(width, inner, options.state, options.window, starts=starts)


ENTRY = Mamba()
