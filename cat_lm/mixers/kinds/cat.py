"""CAT: softmax attention over convolved queries, keys and values (Definition 1 of the paper).

Without position embeddings by default. The rest is Zoology's attention layer: a projection with
bias, dropout 0.1 on the attention map, an output projection with bias. Every other pattern of
attention is a mixer by its name as well: CAT with this pattern.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.options import (
    ConvolutionOptions,
    StreamSettings,
    check_choice,
    check_fraction,
    stream_settings,
)
from cat_lm.model import attention
from cat_lm.model.attention import PATTERNS, Pattern
from cat_lm.ops.convolution import kinds

if TYPE_CHECKING:
    from torch import nn

POSITIONS = ("none", "learned", "rope")


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of CAT.

    Attributes:
        dropout: of the attention map.
        position: none; learned, a table added to the embeddings; rope, after the filters.
        conv_mixing: what a multihead convolution of the values mixes: embeddings, their heads; or
            maps, the attention maps over heads and keys (see `MapMixingCore`).
    """

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

        return Attention(options.plain, self.settings(options, setting.d_model))

    def layout_settings(self, options: Any, width: int) -> StreamSettings:
        settings = self.settings(options, width)
        # A language model lays its rows out itself.
        settings.takes_gaps, settings.keeps_padding = False, True
        return settings

    def cache_layer(self, options: Any) -> type:
        from cat_lm.model.cache import StateDynamicLayer

        own = attention.pattern(self.settings(options, options.heads)).cache_layers()
        return StateDynamicLayer if own is None else own[0]


class PatternAttention(ConvolvedAttention):
    """CAT with a pattern of attention, whose options stand beside CAT's."""

    def __init__(self, pattern: Pattern) -> None:
        own = [(name, type(value), value) for name, value in pattern.options.items()]
        self.Options = dataclasses.make_dataclass("Options", own, bases=(Options,), frozen=True)
        self.pattern, self.name = pattern, pattern.name.replace("_", "-")
        self.longest, self.computes_on_cpu = pattern.longest, pattern.computes_on_cpu
        self.__module__ = type(pattern).__module__  # It is a plugin's where the pattern is one.

    def check(self, options: Any, setting: Setting) -> None:
        super().check(options, setting)
        settings = self.settings(options, setting.d_model)
        if problems := attention.problems(settings, settings._attn_implementation):
            raise ValueError(problems[0])

    def attention_settings(self, options: Any) -> dict[str, Any]:
        own = {name: getattr(options, name) for name in self.pattern.options}
        able = self.pattern.implementations
        by = "sdpa" if able is None or "sdpa" in able else min(able)
        chosen = {"attention": self.pattern.name, "attention_options": own}
        return super().attention_settings(options) | chosen | {"_attn_implementation": by}


def pattern_mixers(known: Collection[str]) -> list[MixerKind]:
    """Make the mixers that patterns of attention are, but for `known` ones.

    A pattern whose options have names of CAT's, or defaults that no text can give, is none.
    """
    # The mixer `attention` is softmax by another name, and mixed maps are an option of `cat`.
    known, found = {*known, "softmax", "map-mixing"}, []
    for pattern in map(PATTERNS.get, PATTERNS.names()):
        is_plain = all(isinstance(value, int | float | str) for value in pattern.options.values())
        is_new = pattern.name.replace("_", "-") not in known
        if is_new and is_plain and not set(pattern.options) & set(Options.__dataclass_fields__):
            found.append(PatternAttention(pattern))
    return found


ENTRY = ConvolvedAttention()
