"""Gated linear attention (Yang et al., 2023): each key channel decays as the input says.

    S_t = diag(α_t) S_{t−1} + k_t v_t^T,   o_t = S_t^T q_t / √d_k,   α = sigmoid(low rank)^{1/16}

then RMSNorm of each head, a swish output gate and a projection; no short convolution by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import check_counts, check_operator, check_positive
from cat_lm.ops.recurrence import EVERY, GLA_FLOPS

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """Options of GLA.

    Attributes:
        heads: H.
        expand_k: width of all keys over C.
        expand_v: width of all values over C.
        operator: torch, our own scan, or fla, flash-linear-attention's on a GPU, see
            cat_lm/ops/recurrence/fla.py.
    """

    heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0
    operator: str = "torch"

    def __post_init__(self) -> None:
        check_counts(self, "heads")
        check_operator(self.operator)
        check_positive(self, "expand_k", "expand_v")

    def sizes(self, width: int) -> tuple[int, int]:
        """Return the channels of all keys and of all values."""
        return int(width * self.expand_k), int(width * self.expand_v)


class GatedLinearAttention(MixerKind):
    """Linear attention whose keys decay."""

    name = "gla"
    Options = Options
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        keys, values = options.sizes(setting.d_model)
        if keys % options.heads or values % options.heads or min(keys, values) < 1:
            raise ValueError(f"heads={options.heads} do not divide {keys} keys, {values} values")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.gla import GatedLinearAttention

        return GatedLinearAttention(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        return GLA_FLOPS * self.state_numbers(options, setting, length)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        keys, values = options.sizes(setting.d_model)
        rounded = 1.25 + (2 * keys + 3 * values) / setting.d_model
        return rounded + self.saved_in_fp32(options, setting)

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        """Count what the scan keeps, the gates, and the norm's two."""
        keys, values = options.sizes(setting.d_model)
        kept = self.state_numbers(options, setting, 1) / EVERY
        return (5 * keys + 3 * values + kept) / setting.d_model

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        keys, values = options.sizes(setting.d_model)
        return keys * values // options.heads


ENTRY = GatedLinearAttention()
