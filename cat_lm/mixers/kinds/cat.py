"""CAT: softmax attention over convolved queries, keys and values (Definition 1 of the paper).

Without position embeddings by default. The rest is Zoology's attention layer: a projection with
bias, dropout 0.1 on the attention map, an output projection with bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.options import (
    ConvolutionOptions,
    attention_flops,
    attention_maps,
    check_choice,
    check_fraction,
)
from cat_lm.mixers.parts.settings import StreamSettings, stream_settings
from cat_lm.model import attention
from cat_lm.ops.convolution import kinds

if TYPE_CHECKING:
    from torch import nn

POSITIONS = ("none", "learned", "rope")


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
        check_fraction(self, "dropout")
        check_choice(self, "position", POSITIONS)
        check_choice(self, "conv_mixing", ("embeddings", "maps"))
        mixes_heads = kinds.mixes_heads(self.conv_type)
        if self.mixes_maps and not (mixes_heads and "v" in (self.streams or "")):
            raise ValueError(
                "conv_mixing=maps: needs conv_type=multihead and the stream v, whose filters mix "
                f"the maps; not conv_type={self.conv_type}, streams={self.streams or 'none'}"
            )

    @property
    def plain(self) -> Options:
        """The options of the streams and the softmax, here all of them."""
        return self

    @property
    def mixes_maps(self) -> bool:
        """Return True if attention maps are mixed."""
        return self.conv_mixing == "maps"


class ConvolvedAttention(MixerKind):
    """Softmax attention over convolved streams; of other options it reads `plain`."""

    name = "cat"
    Options = Options
    layers = 1
    supports = ALL

    def learned_positions(self, options: Any) -> bool:
        return options.plain.position == "learned"

    def check(self, options: Any, setting: Setting) -> None:
        heads = options.heads
        if setting.d_model % heads:
            raise ValueError(f"heads={heads} do not divide d_model={setting.d_model}")
        if options.plain.position == "rope" and setting.d_model % (2 * heads):
            raise ValueError(f"position=rope: d_model={setting.d_model} gives odd heads")

    def settings(self, options: Any, width: int) -> StreamSettings:
        """Make the settings that options stand for, in a layer of `width` channels."""
        return stream_settings(options.plain, width, **self.attention_settings(options))

    def attention_settings(self, options: Any) -> dict[str, Any]:
        """Return those of attention."""
        plain = options.plain
        return {
            "attention_dropout": plain.dropout,
            "position_embedding": "rope" if plain.position == "rope" else "none",
            "conv_mixing": plain.conv_mixing,
        }

    def build(self, options: Any, setting: Setting) -> nn.Module:
        from cat_lm.mixers.parts.attention import Attention

        settings = self.settings(options, setting.d_model)
        return Attention(options.plain, settings, options.plain.bias)

    def layout_settings(self, options: Any, width: int) -> StreamSettings:
        return self.settings(options, width).of_model()

    def cache_layer(self, options: Any) -> type:
        from cat_lm.model.cache import StateDynamicLayer

        own = attention.pattern(self.settings(options, options.heads)).cache_layers()
        return StateDynamicLayer if own is None else own[0]

    def mixing_flops(self, options: Any, setting: Setting, length: int) -> float:
        plain, width = options.plain, setting.d_model
        scores_and_sums = attention_flops(length, width)
        if plain.mixes_maps:  # every map meets the values of all heads
            scores_and_sums *= (1 + plain.heads) / 2
        return scores_and_sums + plain.filter_flops(width)

    def saved_tensors(self, options: Any, setting: Setting) -> float:
        plain = options.plain
        turned = 2 * (plain.position == "rope")
        mixed = 2 * (plain.heads - 1) if plain.mixes_maps else 0
        own = max(plain.convolved, turned) + plain.kept
        return 5.0 + own + plain.activated + mixed

    def saved_maps(self, options: Any, setting: Setting) -> float:
        return attention_maps(options.heads, options.dropout)

    def saved_masks(self, options: Any, setting: Setting) -> float:
        return 0.0 if options.dropout or options.plain.mixes_maps else 1.0

    def state_numbers(self, options: Any, setting: Setting, length: int) -> int:
        plain = options.plain
        past = plain.remembered * plain.convolved
        return setting.d_model * (2 * length + past)


ENTRY = ConvolvedAttention()
