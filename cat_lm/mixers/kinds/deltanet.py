"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import DeltaOptions, check_operator
from cat_lm.ops.recurrence import DELTA_FLOPS

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(DeltaOptions):
    """Options of DeltaNet: those of both delta-rule layers, and its own.

    Attributes:
        operator: torch, or fla, flash-linear-attention's on a GPU, see
            cat_lm/ops/recurrence/fla.py.
    """

    operator: str = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_operator(self.operator)


class DeltaNet(MixerKind):
    """The delta rule."""

    name = "deltanet"
    Options = Options
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        options.check(setting.d_model, 1.0)

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.delta import DeltaRuleLayer
        from cat_lm.ops.recurrence import fla

        operator = fla.delta_rule if options.operator == "fla" else None
        return DeltaRuleLayer(options, setting, expand_v=1.0, gated=False, operator=operator)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        return options.mixing_flops(setting.d_model, 1.0, each=DELTA_FLOPS)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return options.saved_tensors(setting.d_model, 1.0, gated=False)

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        return options.saved_in_fp32(setting.d_model, 1.0, gated=False)

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        return options.state_numbers(setting.d_model, 1.0)


ENTRY = DeltaNet()
