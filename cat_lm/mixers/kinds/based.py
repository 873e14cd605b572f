"""Based: a gated short convolution in even layers, Taylor linear attention in odd ones.

As Zoology's hybrid of its synthetic runs (Arora et al., 2024): layer i is entry i mod 2 of (short
convolution, attention), so that Based with one layer has no attention at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import check_counts, convolution_flops

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """Options of Based.

    Attributes:
        features: f, channels of queries and keys before the feature map.
        window: W of the short convolution.
    """

    features: int = 8
    window: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "features", "window")

    @property
    def mapped(self) -> int:
        """Channels after the feature map: 1, f and f²."""
        return 1 + self.features + self.features**2


class Based(MixerKind):
    """Convolutions and linear attention in turn."""

    name = "based"
    Options = Options
    supports = ALL

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.based import GatedShortConvolution, TaylorAttention

        kind = TaylorAttention if setting.layer % 2 else GatedShortConvolution
        return kind(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        if setting.layer % 2:
            return 6 * length * (options.mapped + setting.d_model)
        return convolution_flops(options.window, setting.d_model)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        if setting.layer % 2:
            return 3 + self.saved_in_fp32(options, setting)
        return 3.0

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        if setting.layer % 2:  # maps of queries and keys, values, sums
            return 2 + 2 * (options.mapped + options.features) / setting.d_model
        return 0.0

    def saved_maps(self, options: Options, setting: Setting) -> float:
        return setting.layer % 2 / 2  # in fp32 alone

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        if setting.layer % 2:
            return options.mapped * (setting.d_model + 1)
        return (options.window - 1) * setting.d_model


ENTRY = Based()
