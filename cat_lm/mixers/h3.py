"""H3 (Fu et al., 2023): y = W_o (q ⊙ SSM_diagonal(SSM_shift(k) ⊙ v)), state space models of time.

    shift:     s_t = s_{t−1} moved by one place + b k_t,   c·s_t + D k_t
    diagonal:  x_t = Ā x_{t−1} + B̄ u_t,   2 Re(C·x_t) + D u_t,   bilinear steps of Δ

with Zoology's parameters at the start: A_n = −1/2 + iπn (S4D-Lin) for half as many complex states
as real ones, B = 1, Δ from 0.001 to 0.1; b = (1, 0, …). In heads wider than 1 the second model runs
over outer products of keys and values. Both models are convolutions with filters made of time, so
that any length has one: the shift's ends after its states, the diagonal's goes on decaying.

They are computed by FFT over the whole row, which neither separates documents nor keeps a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import MixerKind, Setting
from cat_lm.mixers.shared import check_counts, fft_flops

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """Options of H3.

    Attributes:
        state: numbers of state of both models; even. Zoology's Figure 2 has as many as positions.
        head_dim: width of a head, 2 in Zoology's Figure 2.
    """

    state: int = 64
    head_dim: int = 2

    def __post_init__(self) -> None:
        if self.state < 2 or self.state % 2:
            raise ValueError(f"state={self.state}: must be even and at least 2")
        check_counts(self, "head_dim")


class HungryHungryHippos(MixerKind):
    """A shift and a diagonal state space model around products."""

    name = "h3"
    Options = Options
    supports = frozenset({"padding"})

    def check(self, options: Options, setting: Setting) -> None:
        if setting.d_model % options.head_dim:
            raise ValueError(
                f"head_dim={options.head_dim} does not divide d_model={setting.d_model}"
            )

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.h3 import H3

        return H3(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        return fft_flops(length, setting.d_model * (1 + options.head_dim))

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 10 + self.saved_in_fp32(options, setting)

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        """Count the transforms, and what makes the filters."""
        return 3 + 6 * options.head_dim + 0.55 * options.state / options.head_dim


MIXER = HungryHungryHippos()
