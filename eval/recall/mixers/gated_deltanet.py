"""Gated DeltaNet (Yang et al., 2024): the delta rule on a state that decays; no output gate here,
as in Zoology's synthetic runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from eval.recall.mixers import Setting
from eval.recall.mixers._delta import DeltaOptions, DeltaRuleLayer

LAYERS = 2


@dataclass(frozen=True)
class Options(DeltaOptions):
    """Options of Gated DeltaNet.

    Attributes:
        expand_v: width of all values over C.
    """

    expand_v: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.expand_v < math.inf:
            raise ValueError(f"expand_v={self.expand_v}: must be a number above 0")


def build(options: Options, setting: Setting) -> nn.Module:
    return DeltaRuleLayer(options, setting, expand_v=options.expand_v, gated=True)
