"""No mixing of positions: the negative control, which can only guess."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from eval.recall.mixers import Setting

LAYERS = 1


@dataclass(frozen=True)
class Options:
    """It has none."""


def build(options: Options, setting: Setting) -> nn.Module:
    return nn.Linear(setting.d_model, setting.d_model)
