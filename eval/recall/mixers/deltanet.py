"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cat_lm.ops.recurrence import fla
from cat_lm.ops.recurrence.fla import check_operator
from eval.recall.mixers import Setting
from eval.recall.mixers._delta import DeltaOptions, DeltaRuleLayer

LAYERS = 2


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


def build(options: Options, setting: Setting) -> nn.Module:
    operator = fla.delta_rule if options.operator == "fla" else None
    return DeltaRuleLayer(options, setting, expand_v=1.0, gated=False, operator=operator)
