"""Hyena (Poli et al., 2023) of order 2: a gated long convolution, its filter made by a network.

    (x₁, x₂, v) = short depthwise convolution of W x + b,   y = W_o (x₂ ⊙ (h * (x₁ ⊙ v) + D x₁ ⊙ v))
    h_t = MLP(z_t) ⊙ exp(−t/(ℓ−1) δ),   z_t = (t/(ℓ−1), cos f 2πt/ℓ, −sin f 2πt/ℓ for each f)

as in Zoology: sines with one learned frequency for each unit, shared by the network's layers, three
features and no floor under the decay, whose rates δ run from ln 100 / 1.5 to ln 100 / 0.3 over the
channels. There z is learned too, one row a position, and ends at the trained length ℓ; here it is
the function of time that it starts as, so that longer sequences have a filter: it goes on decaying.

The long convolution is an FFT over the whole row, which neither separates documents nor has a
finite state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import MixerKind, Setting
from cat_lm.mixers.shared import check_counts, convolution_flops, fft_flops

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """Options of Hyena.

    Attributes:
        length: ℓ, the unit of time of the filter; Zoology's is the length of its sequences.
        window: W of the short convolutions.
        hidden: width of the filter's network.
        features: of time, odd: the time and pairs of waves.
    """

    length: int = 128
    window: int = 3
    hidden: int = 64
    features: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "window", "hidden")
        if self.length < 2:
            raise ValueError(f"length={self.length}: must be at least 2")
        if self.features < 3 or self.features % 2 == 0:
            raise ValueError(f"features={self.features}: must be odd and at least 3")


class Hyena(MixerKind):
    """A gated long convolution."""

    name = "hyena"
    Options = Options
    supports = frozenset({"padding"})

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.hyena import Hyena

        return Hyena(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        width = setting.d_model
        return fft_flops(length, width) + convolution_flops(options.window, 3 * width)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 16.5 + 4.5 * options.hidden / setting.d_model

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        return 6.5  # the transforms, and what goes into them


MIXER = Hyena()
