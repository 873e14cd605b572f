"""Mamba-2 (Dao and Gu, 2024), with the library's names of parameters.

    S_t = exp(Δ_t a) S_{t−1} + Δ_t B_t x_t^T,   y_t = S_t^T C_t + D x_t

for each head, with one rate a and one step size Δ; B and C belong to a group of heads. The scan is
Mamba's (`cat_lm.ops.recurrence`) with keys B, values Δ x and queries C.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.initial_steps import Starts
from cat_lm.model.context import Context, at_least_fp32
from cat_lm.model.sequence import SequenceGroup, own_heads, to_heads, to_sequence, to_tokens
from cat_lm.model.streams.short_convolution import ShortConvolution
from cat_lm.ops.recurrence.decaying_scan import decaying_scan


class GatedRMSNorm(nn.Module):
    """RMSNorm of x ⊙ SiLU(gate), each group of channels by its own size."""

    no_decay = ("weight",)

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(width))

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the weight starts from."""
        return {"weight": torch.ones_like(self.weight)}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute [B, T, I] in the dtype of `gate`, from fp32."""
        gated = at_least_fp32(x) * F.silu(at_least_fp32(gate))
        parts = gated.unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)
        return self.weight * normed.to(gate.dtype)


class Mamba2Mixer(nn.Module):
    """The state space of a layer, with the names of transformers' Mamba-2.

    Args:
        width: C.
        heads, head_width: H heads of P channels.
        states: N, numbers of state for each channel.
        groups: of heads, which share B and C.
        window: W of the short convolution.
        bias: of the first and the last projection.
        conv_bias: of the short convolution.
        step_limit: the bounds of all Δ.
        norm_eps: added to mean squares in the gated norm.
        starts: of the parameters.
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
        """Return what the parameters start from, by name; the first projection's start is usual."""
        return {
            "A_log": torch.arange(1.0, self.heads + 1).log(),
            "D": torch.ones(self.heads),
            "dt_bias": self.starts.steps(self.heads),
            "out_proj.weight": self.starts.output(self.out_proj.weight),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]."""
        sizes = [self.parts[0], sum(self.parts), self.heads]
        gate, x, steps = self.in_proj(x).split(sizes, dim=-1)
        x, b, c = self.conv1d(x, context).split(self.parts, dim=-1)
        delta = F.softplus(at_least_fp32(steps) + at_least_fp32(self.dt_bias))
        # A step of no length leaves the state as it was.
        delta = context.without_padding(delta.clamp(*self.step_limit))
        x = x.unflatten(-1, (-1, self.head_width))  # [B, T, H, P]
        group = context.group
        (own,), (delta,) = to_heads(group, x), to_heads(group, delta)
        b, c = to_sequence(group, b), to_sequence(group, c)
        y = to_tokens(group, context.recur(partial(self._scan, context), own, delta, b, c))
        y = y + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2), gate))

    def _scan(
        self, context: Context, x: Tensor, delta: Tensor, b: Tensor, c: Tensor, **how: object
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y [B, T, H, P] of x, Δ [B, T, H], B and C [B, T, G N]; as `decaying_scan`."""
        group = context.group
        k, q = self._for_own_heads(b, group), self._for_own_heads(c, group)
        a = -at_least_fp32(own_heads(group, self.A_log)).exp()[:, None, None]
        rate, v = delta[..., None, None], delta[..., None] * x
        found = decaying_scan(q, k, v, rate, a, backend=context.mixer_backend, **how)
        if how.get("return_state"):
            return found[0].to(x.dtype), found[1]
        return found.to(x.dtype)

    def _for_own_heads(self, x: Tensor, group: SequenceGroup | None) -> Tensor:
        """Return B or C [B, T, G N] for this rank's heads: [B, T, H, N], in fp32 at least."""
        count, heads = self.groups, self.heads
        each = heads // count
        own = slice(0, heads) if group is None else group.span(heads)
        # The groups that own heads belong to, before they are copied for each head. Of one group
        # these are views, so that the cast to fp32 comes first.
        first, end = own.start // each, -(-own.stop // each)
        read = at_least_fp32(x.unflatten(-1, (count, 1, -1))[:, :, first:end])
        read = read.expand(-1, -1, -1, each, -1).flatten(2, 3)
        return read[:, :, own.start - first * each : own.stop - first * each]
