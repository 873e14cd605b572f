"""The mixers of GLA, DeltaNet and Gated DeltaNet, with flash-linear-attention's parameter names.

What a mixer takes and does with padding, documents and states is said in `cat_lm.mixers.base`; the
recurrences and their rates are those of the mixers of the recall experiments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import (
    State,
    at_least_fp32,
    from_state,
    without_padding,
)
from cat_lm.mixers.modules.delta import initial_decay, log_decay
from cat_lm.mixers.modules.gla import decayed_attention, gated_linear_attention
from cat_lm.model.sequence import SequenceGroup, to_heads, to_tokens
from cat_lm.model.short_convolution import ShortConvolution
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.recurrence import GLA_LOW_RANK, backends, fla
from cat_lm.ops.recurrence.backends import Recurrence
from cat_lm.ops.recurrence.delta_rule import delta_rule

if TYPE_CHECKING:
    from cat_lm.model.hf.configuration_linear import LinearConfig


class GatedNorm(nn.RMSNorm):
    """RMSNorm of each head, times SiLU of a gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * F.silu(gate)


class LinearMixer(nn.Module):
    """Projections, short convolutions and the choice of an operator.

    Attributes:
        recurrence: what is computed.
    """

    recurrence: ClassVar[Recurrence]
    sequence_group: SequenceGroup | None = None

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.mixer_backend = "auto"
        self.heads, width = config.num_heads, config.hidden_size
        keys, values = config.key_channels, config.value_channels
        std = config.initializer_range if config.conv_init == "normal" else None
        for stream, channels in zip(STREAMS, (keys, keys, values), strict=True):
            self.add_module(f"{stream}_proj", nn.Linear(width, channels, bias=False))
            if config.window:
                convolution = ShortConvolution(channels, config.window, bias=False, std=std)
                self.add_module(f"{stream}_conv1d", convolution)
        if config.gated_output:
            self.g_proj = nn.Linear(width, values, bias=False)
        self.o_proj = nn.Linear(values, width, bias=False)

    def streams(self, x: Tensor, **how: Any) -> list[Tensor]:
        """Make queries, keys and values [B, T, H, D] of x [B, T, C]."""
        made = []
        for stream in STREAMS:
            y = self.get_submodule(f"{stream}_proj")(x)
            if hasattr(self, f"{stream}_conv1d"):
                y = self.get_submodule(f"{stream}_conv1d")(y, name=f"{stream}_inputs", **how)
            made.append(self.of_heads(y))
        return made

    def of_heads(self, x: Tensor) -> Tensor:
        """Split the channels, [B, T, H D] to [B, T, H, D]."""
        return x.unflatten(-1, (self.heads, -1))

    def operator(self, v: Tensor) -> Callable[..., Any]:
        """Choose what computes the recurrence of such values. Raises ValueError: it cannot."""
        name = self.mixer_backend
        if name != "auto" or v.is_cuda:  # on a CPU the operators choose by themselves
            name = backends.choose_backend(self.recurrence, v.device, v.dtype, name).name
        return self.computed_by(name)

    def computed_by(self, backend: str) -> Callable[..., Any]:
        """Return a backend's operator; that of auto chooses by its tensors."""
        raise NotImplementedError


class GatedLinearAttention(LinearMixer):
    """Linear attention whose keys decay, see `cat_lm.mixers.kinds.gla`."""

    recurrence = backends.GLA

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        width, keys = config.hidden_size, config.key_channels
        self.gk_proj = nn.Sequential(
            nn.Linear(width, GLA_LOW_RANK, bias=False), nn.Linear(GLA_LOW_RANK, keys)
        )
        head = config.value_channels // config.num_heads
        self.g_norm_swish_gate = GatedNorm(head, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        gates = self.of_heads(self.gk_proj(x))
        q, k, v, gates = to_heads(self.sequence_group, *self.streams(x, **how), gates)
        y = decayed_attention(q, k, v, gates, operator=self.operator(v), **how)
        y = to_tokens(self.sequence_group, y)
        y = self.g_norm_swish_gate(y, self.of_heads(self.g_proj(x)))
        return self.o_proj(y.flatten(2))

    def computed_by(self, backend: str) -> Callable[..., Any]:
        if backend == "fla":
            return fla.chunked_gated_linear_attention
        return partial(gated_linear_attention, backend=backend)


class DeltaRule(LinearMixer):
    """The delta rule of unit queries and keys, see `cat_lm.mixers.kinds.deltanet`."""

    recurrence = backends.DELTA_RULE

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.b_proj = nn.Linear(config.hidden_size, config.num_heads, bias=False)
        norm = GatedNorm if config.gated_output else nn.RMSNorm
        self.o_norm = norm(config.value_channels // config.num_heads, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "state": state}
        streams = self.streams(x, padding_mask=padding_mask, **how)
        q, k, v = to_heads(self.sequence_group, *streams)
        # Without β and a decay a step leaves the state as it was.
        rates = [without_padding(rate, padding_mask) for rate in self.rates(x)]
        rates = [own for rate in rates for own in to_heads(self.sequence_group, rate)]
        y = from_state(self.operator(v), unit(q), unit(k), v, *rates, **how)
        y = to_tokens(self.sequence_group, y)
        return self.o_proj(self.normed(y, x).flatten(2))

    def computed_by(self, backend: str) -> Callable[..., Any]:
        return fla.chunked_delta_rule if backend == "fla" else delta_rule

    def rates(self, x: Tensor) -> list[Tensor]:
        """Compute β, and the logarithm of the decay where there is one, [B, T, H]."""
        return [self.b_proj(x).sigmoid()]

    def normed(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm the heads' outputs y [B, T, H, V] of the input x."""
        return self.o_norm(y)


class GatedDeltaRule(DeltaRule):
    """The delta rule on a state that decays, its output gated."""

    recurrence = backends.GATED_DELTA_RULE
    no_decay = ("A_log", "dt_bias")

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.a_proj = nn.Linear(config.hidden_size, config.num_heads, bias=False)
        for name, values in initial_decay(self.heads).items():
            self.register_parameter(name, nn.Parameter(values))

    def initial_values(self) -> dict[str, Tensor]:
        """Draw the rates as they are published, by name."""
        return initial_decay(self.heads)

    def rates(self, x: Tensor) -> list[Tensor]:
        return [*super().rates(x), log_decay(self.a_proj(x), self.dt_bias, self.A_log)]

    def normed(self, y: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(y, self.of_heads(self.g_proj(x)))


def unit(x: Tensor) -> Tensor:
    """Scale each head to length 1, as flash-linear-attention does: x / √(Σ x² + 10⁻⁶)."""
    wide = at_least_fp32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
