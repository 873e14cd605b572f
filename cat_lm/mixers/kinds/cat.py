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


ENTRY = ConvolvedAttention()
