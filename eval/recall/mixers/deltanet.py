"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from eval.recall.mixers import Setting
from eval.recall.mixers._delta import DeltaOptions, DeltaRuleLayer

LAYERS = 2


@dataclass(frozen=True)
class Options(DeltaOptions):
    """Options of DeltaNet: those of both delta-rule layers."""


def build(options: Options, setting: Setting) -> nn.Module:
    return DeltaRuleLayer(options, setting, expand_v=1.0, gated=False)
