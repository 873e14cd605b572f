"""Mamba (Gu and Dao, 2023): a selective state space model, in its own block without a second norm.

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t,   y_t = C_t h_t + D x_t

Published recall curves of Mamba were often made with a harness that re-initialised all linear
layers and set dt_proj.bias to 0, which undoes Mamba's spread of time scales. `init=zoology` does
the same; `init=own` keeps Mamba's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import check_counts, convolution_flops
from cat_lm.ops.recurrence import EVERY

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """Options of Mamba.

    Attributes:
        state: numbers of state for each channel.
        window: W of its short convolution.
        expand: inner width over C.
        init: own, or zoology, which treats Mamba's linear layers as all others.
    """

    state: int = 16
    window: int = 4
    expand: int = 2
    init: str = "own"

    def __post_init__(self) -> None:
        check_counts(self, "state", "window", "expand")
        if self.init not in ("own", "zoology"):
            raise ValueError(f"init={self.init!r}: must be own or zoology")


class Mamba(MixerKind):
    """The selective state space model."""

    name = "mamba"
    Options = Options
    block = "rms"
    supports = ALL

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.mamba import SelectiveStateSpace

        return SelectiveStateSpace(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        inner = options.expand * setting.d_model
        return 27 * inner * options.state + convolution_flops(options.window, inner)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        width = setting.d_model
        low_rank = 1.25 * (math.ceil(width / 16) + 2 * options.state) / width
        return 1 + options.expand * (10 + options.state / EVERY) + low_rank

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        """Count Δ before and after its softplus, Δ x, B, C, and the scan's states."""
        states = options.expand * (3 + options.state / EVERY)
        return states + 2 * options.state / setting.d_model

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        return options.expand * setting.d_model * (options.state + options.window - 1)


ENTRY = Mamba()
