"""No mixing of positions: the negative control, which can only guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """It has none."""


class NoMixing(MixerKind):
    """A linear layer, for each token by itself."""

    name = "none"
    Options = Options
    layers = 1
    supports = ALL

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.none import NoMixing

        return NoMixing(setting.d_model, setting.d_model)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        return 0.0

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 1.0

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        return 0


ENTRY = NoMixing()
