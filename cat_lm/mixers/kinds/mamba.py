"""Mamba (Gu and Dao, 2023) and Mamba-2 (Dao and Gu, 2024), in the names of transformers' models.

    Mamba:    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t,       y_t = C_t h_t + D x_t
    Mamba-2:  S_t = exp(Δ_t a) S_{t−1} + Δ_t B_t x_t^T,     y_t = S_t^T C_t + D x_t

each between a short convolution and a gate. Mamba has a rate for each channel and number of state;
Mamba-2, of which only language models are made, one rate a and one step size Δ for each head, whose
B and C belong to a group of heads. Step sizes, decays and states are computed in fp32 whatever the
precision.

Published recall curves of Mamba were often made with a harness that re-initialised all linear
layers and set dt_proj.bias to 0, which undoes Mamba's spread of time scales. As a mixer by name,
`init=zoology` does the same; `init=own` keeps Mamba's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting, check_choice, check_counts
from cat_lm.model.context import Context, at_least_fp32
from cat_lm.model.sequence import SequenceGroup, own_heads, to_heads, to_sequence, to_tokens
from cat_lm.model.streams.short_convolution import ShortConvolution
from cat_lm.ops.recurrence.decaying_scan import decaying_scan


@dataclass(frozen=True)
class Starts:
    """The initialization of a Mamba or Mamba-2 layer's parameters.

    Attributes:
        fastest, slowest: the bounds of Δ, which is spread evenly in its logarithm.
        floor: the least Δ, to which smaller ones are raised.
        layers: by whose root the output's projection is divided; None for not at all.
        by: family, linear layers from the model's normal distribution but for Δ's and the
            output's; torch, all linear layers and the convolution as torch draws them, but for
            these two; zoology, as torch but for the linear layers, which start as the model's.
    """

    fastest: float = 0.1
    slowest: float = 1e-3
    floor: float = 0.0
    layers: int | None = None
    by: str = "family"

    def steps(self, count: int) -> Tensor:
        """Draw softplus⁻¹(Δ), [count]."""
        low, high = math.log(self.slowest), math.log(self.fastest)
        steps = (low + (high - low) * torch.rand(count)).exp().clamp(min=self.floor)
        return steps + torch.log(-torch.expm1(-steps))

    def output(self, weight: Tensor) -> Tensor:
        """Draw a projection to the residual stream with torch's default for linear layers."""
        bound = 1 / math.sqrt(weight.shape[1])
        if self.layers is not None:
            bound /= math.sqrt(self.layers)
        return torch.empty_like(weight).uniform_(-bound, bound)


class StepProjection(nn.Linear):
    """The projection to Δ before its softplus; the bias is added in fp32.

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
        rank: the rank of the projection to Δ; None: a sixteenth of C.
        bias: the bias of the first and the last projection.
        conv_bias: the bias of the short convolution.
        starts: initial values of the parameters.
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
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv1d(x, context)
        low_rank, b, c = self.x_proj(x).split(self.sizes, dim=-1)
        # At padding the step size is zero, so that the state stays unchanged.
        delta = context.without_padding(F.softplus(self.dt_proj(low_rank)))
        a = -at_least_fp32(self.A_log).exp()
        scan, group = partial(decaying_scan, backend=context.mixer_backend), context.group
        # Each channel counts as a head here.
        (own,), (delta,) = to_heads(group, x), to_heads(group, delta)
        b, c = to_sequence(group, b), to_sequence(group, c)
        a = own_heads(group, a)
        # Keys and queries are shared by all channels: one head with a decay for each channel.
        q, k, v = c[:, :, None], b[:, :, None], (delta * own)[:, :, None]
        y = context.recur(scan, q, k, v, delta[:, :, None, None], a.T[None])
        y = to_tokens(group, y.squeeze(2).to(x.dtype)) + self.D * x
        return self.out_proj(y * F.silu(gate))


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm of x ⊙ SiLU(gate), where each group of channels is normalised separately."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__(width, eps)
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return [B, T, I] in the dtype of `gate`, computed in fp32."""
        gated = at_least_fp32(x) * F.silu(at_least_fp32(gate))
        parts = gated.unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)
        return self.weight * normed.to(gate.dtype)


class Mamba2Mixer(nn.Module):
    """The state space of a layer, with the names of transformers' Mamba-2.

    Args:
        heads, head_width: H heads of P channels.
        groups: number of groups of heads, which share B and C.
        step_limit: the bounds of all Δ.
        norm_eps: added to mean squares in the gated norm.
        width, states, window, bias, conv_bias, starts: as of `MambaMixer`.
    """

    no_decay = ("A_log", "D", "dt_bias")

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        states: int,
        groups: int,
        window: int,
        *,
        bias: bool,
        conv_bias: bool,
        step_limit: tuple[float, float],
        norm_eps: float,
        starts: Starts,
    ) -> None:
        super().__init__()
        self.starts, self.step_limit = starts, step_limit
        self.heads, self.head_width, self.groups = heads, head_width, groups
        inner = heads * head_width
        self.parts = [inner, groups * states, groups * states]
        self.in_proj = nn.Linear(width, inner + sum(self.parts) + heads, bias=bias)
        self.conv1d = ShortConvolution(sum(self.parts), window, conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(inner, groups, norm_eps)
        self.out_proj = nn.Linear(inner, width, bias=bias)

    def initial_values(self) -> dict[str, Tensor]:
        return {
            "A_log": torch.arange(1.0, self.heads + 1).log(),
            "D": torch.ones(self.heads),
            "dt_bias": self.starts.steps(self.heads),
            "out_proj.weight": self.starts.output(self.out_proj.weight),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        sizes = [self.parts[0], sum(self.parts), self.heads]
        gate, x, steps = self.in_proj(x).split(sizes, dim=-1)
        x, b, c = self.conv1d(x, context).split(self.parts, dim=-1)
        delta = F.softplus(at_least_fp32(steps) + at_least_fp32(self.dt_bias))
        # At padding the step size is zero, so that the state stays unchanged.
        delta = context.without_padding(delta.clamp(*self.step_limit))
        x = x.unflatten(-1, (-1, self.head_width))  # [B, T, H, P]
        group = context.group
        (own,), (delta,) = to_heads(group, x), to_heads(group, delta)
        b, c = to_sequence(group, b), to_sequence(group, c)
        k, q = self._for_own_heads(b, group), self._for_own_heads(c, group)
        a = -at_least_fp32(own_heads(group, self.A_log)).exp()[:, None, None]
        rate, v = delta[..., None, None], delta[..., None] * own
        y = context.recur(partial(decaying_scan, backend=context.mixer_backend), q, k, v, rate, a)
        y = to_tokens(group, y.to(x.dtype)) + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2), gate))

    def _for_own_heads(self, x: Tensor, group: SequenceGroup | None) -> Tensor:
        """Return B or C [B, T, G N] for this rank's heads: [B, T, H, N], in fp32 at least."""
        count, heads = self.groups, self.heads
        each = heads // count
        own = slice(0, heads) if group is None else group.span(heads)
        # Select the groups of this rank's heads before they are copied for each head. A single
        # The cast to fp32 comes first, because `group` returns views.
        first, end = own.start // each, -(-own.stop // each)
        read = at_least_fp32(x.unflatten(-1, (count, 1, -1))[:, :, first:end])
        read = read.expand(-1, -1, -1, each, -1).flatten(2, 3)
        return read[:, :, own.start - first * each : own.stop - first * each]


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
