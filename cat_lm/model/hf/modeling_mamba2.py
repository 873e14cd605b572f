"""`CatMamba2ForCausalLM`: Mamba-2 (Dao and Gu, 2024), with the library's names of parameters.

    S_t = exp(Δ_t a) S_{t−1} + Δ_t B_t x_t^T,   y_t = S_t^T C_t + D x_t

for each head, with one rate a and one step size Δ; B and C belong to a group of heads. The scan is
Mamba's (`cat_lm.ops.recurrence`) with keys B, values Δ x and queries C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import State, at_least_fp32, from_state, without_padding
from cat_lm.model.hf.configuration_mamba import CatMamba2Config
from cat_lm.model.hf.modeling_mamba import (
    CatMambaForCausalLM,
    CatMambaModel,
    MambaLayer,
    first_output,
    first_steps,
)
from cat_lm.model.sequence import SequenceGroup, own_heads, to_heads, to_sequence, to_tokens
from cat_lm.model.short_convolution import ShortConvolution
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
    """The state space of a layer. H heads of P channels, N numbers of state for each channel."""

    no_decay = ("A_log", "D", "dt_bias")
    sequence_group: SequenceGroup | None = None

    def __init__(self, config: CatMamba2Config) -> None:
        super().__init__()
        self.config, self.mixer_backend = config, "auto"
        width, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
        states = config.n_groups * config.state_size
        self.parts = [inner, states, states]
        self.in_proj = nn.Linear(width, inner + sum(self.parts) + heads, bias=config.use_bias)
        self.conv1d = ShortConvolution(sum(self.parts), config.conv_kernel, config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(inner, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(inner, width, bias=config.use_bias)

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the parameters start from, by name; the first projection's start is usual."""
        heads = self.config.num_heads
        return {
            "A_log": torch.arange(1.0, heads + 1).log(),
            "D": torch.ones(heads),
            "dt_bias": first_steps(self.config, heads),
            "out_proj.weight": first_output(self.config, self.out_proj.weight),
        }

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        """Compute [B, T, C]; see `cat_lm.mixers.base`."""
        how = {"document_ids": document_ids, "state": state}
        sizes = [self.parts[0], sum(self.parts), self.config.num_heads]
        gate, x, steps = self.in_proj(x).split(sizes, dim=-1)
        x, b, c = self.conv1d(x, padding_mask=padding_mask, **how).split(self.parts, dim=-1)
        delta = F.softplus(at_least_fp32(steps) + at_least_fp32(self.dt_bias))
        # A step of no length leaves the state as it was.
        delta = without_padding(delta.clamp(*self.config.time_step_limit), padding_mask)
        x = x.unflatten(-1, (-1, self.config.head_dim))  # [B, T, H, P]
        group = self.sequence_group
        (own,), (delta,) = to_heads(group, x), to_heads(group, delta)
        b, c = to_sequence(group, b), to_sequence(group, c)
        y = to_tokens(group, from_state(self._scan, own, delta, b, c, **how))
        y = y + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2), gate))

    def _scan(
        self, x: Tensor, delta: Tensor, b: Tensor, c: Tensor, **how: object
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y [B, T, H, P] of x, Δ [B, T, H], B and C [B, T, G N]; as `decaying_scan`."""
        k, q = self._for_own_heads(b), self._for_own_heads(c)
        a = -at_least_fp32(own_heads(self.sequence_group, self.A_log)).exp()[:, None, None]
        rate, v = delta[..., None, None], delta[..., None] * x
        found = decaying_scan(q, k, v, rate, a, backend=self.mixer_backend, **how)
        if how.get("return_state"):
            return found[0].to(x.dtype), found[1]
        return found.to(x.dtype)

    def _for_own_heads(self, x: Tensor) -> Tensor:
        """Return B or C [B, T, G N] for this rank's heads: [B, T, H, N], in fp32 at least."""
        count, heads = self.config.n_groups, self.config.num_heads
        each, group = heads // count, self.sequence_group
        own = slice(0, heads) if group is None else group.span(heads)
        # The groups that own heads belong to, before they are copied for each head. Of one group
        # these are views, so that the cast to fp32 comes first.
        first, end = own.start // each, -(-own.stop // each)
        read = at_least_fp32(x.unflatten(-1, (count, 1, -1))[:, :, first:end])
        read = read.expand(-1, -1, -1, each, -1).flatten(2, 3)
        return read[:, :, own.start - first * each : own.stop - first * each]


class Mamba2Layer(MambaLayer):
    """Mamba's layer around `Mamba2Mixer`."""

    mixer_class = Mamba2Mixer


class CatMamba2Model(CatMambaModel):
    """The model without its head."""

    config_class = CatMamba2Config
    config: CatMamba2Config
    layer_class = Mamba2Layer
    _no_split_modules = ("Mamba2Layer",)
    _can_record_outputs = {"hidden_states": Mamba2Layer}  # noqa: RUF012


class CatMamba2ForCausalLM(CatMambaForCausalLM):
    """The language model. `state_dict()` has the names of transformers' Mamba-2."""

    config_class = CatMamba2Config
    config: CatMamba2Config
    body_class = CatMamba2Model
    _no_split_modules = ("Mamba2Layer",)
    _can_record_outputs = {"hidden_states": Mamba2Layer}  # noqa: RUF012
