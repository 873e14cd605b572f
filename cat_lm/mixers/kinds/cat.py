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
    check_choice,
)
from cat_lm.ops.convolution import kinds

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of CAT.

    Attributes:
        bias: of the projections.
        dropout: of the attention map.
        position: none; learned, a table added to the embeddings; rope, after the filters.
        conv_mixing: what a multihead convolution of the values mixes: embeddings, their heads; or
            maps, the attention maps over heads and keys (see `MapMixingCore`).
    """

    bias: bool = True
    dropout: float = 0.1
    position: str = "none"
    conv_mixing: str = "embeddings"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if self.position not in ("none", "learned", "rope"):
            raise ValueError(f"position={self.position!r}: must be none, learned or rope")
        check_choice(self, "conv_mixing", ("embeddings", "maps"))
        mixes_heads = kinds.mixes_heads(self.conv_type)
        if self.mixes_maps and not (mixes_heads and "v" in (self.streams or "")):
            raise ValueError(
                "conv_mixing=maps: needs conv_type=multihead and the stream v, whose filters mix "
                f"the maps; not conv_type={self.conv_type}, streams={self.streams or 'none'}"
            )

    @property
    def mixes_maps(self) -> bool:
        """Return True if attention maps are mixed."""
        return self.conv_mixing == "maps"


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
        scores_and_sums = attention_flops(length, width)
        if options.mixes_maps:  # every map meets the values of all heads
            scores_and_sums *= (1 + options.heads) / 2
        return scores_and_sums + options.filter_flops(width)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        turned = 2 * (options.position == "rope")
        mixed = 2 * (options.heads - 1) if options.mixes_maps else 0
        own = max(options.convolved, turned) + options.kept
        return 5.0 + own + options.activated + mixed

    def saved_maps(self, options: Options, setting: Setting) -> float:
        return attention_maps(options.heads, options.dropout)

    def saved_masks(self, options: Options, setting: Setting) -> float:
        return 0.0 if options.dropout or options.mixes_maps else 1.0

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        past = options.remembered * options.convolved
        values = options.heads if options.mixes_maps else 1
        return setting.d_model * ((1 + values) * length + past)


ENTRY = ConvolvedAttention()
