"""Gated DeltaNet (Yang et al., 2024): the delta rule on a state that decays; no output gate here,
as in Zoology's synthetic runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import DeltaOptions, check_positive
from cat_lm.ops.recurrence import GATED_DELTA_FLOPS

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(DeltaOptions):
    """Options of Gated DeltaNet.

    Attributes:
        expand_v: width of all values over C.
    """

    expand_v: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "expand_v")


class GatedDeltaNet(MixerKind):
    """The delta rule with decay."""

    name = "gated-deltanet"
    Options = Options
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        options.check(setting.d_model, options.expand_v)

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.delta import DeltaRuleLayer

        return DeltaRuleLayer(options, setting, expand_v=options.expand_v, gated=True)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        return options.mixing_flops(setting.d_model, options.expand_v, each=GATED_DELTA_FLOPS)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return options.saved_tensors(setting.d_model, options.expand_v, gated=True)

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        return options.saved_in_fp32(setting.d_model, options.expand_v, gated=True)

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        return options.state_numbers(setting.d_model, options.expand_v)


ENTRY = GatedDeltaNet()
