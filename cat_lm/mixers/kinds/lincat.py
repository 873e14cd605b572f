"""LinCAT: linear attention over convolved queries, keys and values, with φ = elu + 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import ConvolutionOptions, attention_flops

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of LinCAT.

    Attributes:
        bias: of the projections.
    """

    bias: bool = True


class ConvolvedLinearAttention(MixerKind):
    """Linear attention over convolved streams."""

    name = "lincat"
    Options = Options
    layers = 1
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        if setting.d_model % options.heads:
            raise ValueError(f"heads={options.heads} do not divide d_model={setting.d_model}")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.linear_attention import LinearConvolutionAugmentedAttention

        return LinearConvolutionAugmentedAttention(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        width = setting.d_model
        return attention_flops(length, width) + options.filter_flops(width)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 8.0 + options.convolved + options.kept + options.activated

    def saved_in_fp32(self, options: Options, setting: Setting) -> float:
        return 4.0  # mapped queries and keys, values, and their sums

    def saved_maps(self, options: Options, setting: Setting) -> float:
        return options.heads / 2  # in fp32 alone

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        width, past = setting.d_model, options.remembered * options.convolved
        head = width // options.heads
        return options.heads * head * (head + 1) + past * width


ENTRY = ConvolvedLinearAttention()
