"""CAT: softmax attention over convolved queries, keys and values (Definition 1 of the paper).

Without position embeddings by default. The rest is Zoology's attention layer: a projection with
bias, dropout 0.1 on the attention map, an output projection with bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import (
    ConvolutionOptions,
    attention_flops,
    attention_maps,
    convolution_flops,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of CAT.

    Attributes:
        bias: of the projections.
        dropout: of the attention map.
        position: none; learned, a table added to the embeddings; rope, after the filters.
    """

    bias: bool = True
    dropout: float = 0.1
    position: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if self.position not in ("none", "learned", "rope"):
            raise ValueError(f"position={self.position!r}: must be none, learned or rope")


class ConvolvedAttention(MixerKind):
    """Softmax attention over convolved streams."""

    name = "cat"
    Options = Options
    layers = 1
    supports = ALL

    def learned_positions(self, options: Options) -> bool:
        return options.position == "learned"

    def check(self, options: Options, setting: Setting) -> None:
        if setting.d_model % options.heads:
            raise ValueError(f"heads={options.heads} do not divide d_model={setting.d_model}")
        if options.position == "rope" and setting.d_model % (2 * options.heads):
            raise ValueError(f"position=rope: d_model={setting.d_model} gives odd heads")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.attention import ConvolutionAugmentedAttention

        return ConvolutionAugmentedAttention(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        width = setting.d_model
        filters = convolution_flops(options.window, options.convolved * width)
        return attention_flops(length, width) + filters

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 5.0 + max(options.convolved, 2 * (options.position == "rope"))

    def saved_maps(self, options: Options, setting: Setting) -> float:
        return attention_maps(options.heads, options.dropout)

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        past = (options.window - 1) * options.convolved
        return setting.d_model * (2 * length + past)


MIXER = ConvolvedAttention()
