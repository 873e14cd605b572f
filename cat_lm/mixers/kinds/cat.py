"""CAT: softmax attention over convolved queries, keys and values (Definition 1 of the paper).

Without position embeddings by default. The rest is Zoology's attention layer: a projection with
bias, dropout 0.1 on the attention map, an output projection with bias.

Every pattern of attention is a mixer as well, CAT with this pattern by its name. Three have options
of their own: softmax, as the mixer `attention`, landmark attention and multi-token attention.
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
    check_counts,
    check_fraction,
    stream_settings,
)
from cat_lm.model import attention
from cat_lm.model.attention import PATTERNS, Pattern
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution import multi_token_options as multi_token
from cat_lm.ops.landmark import options as landmark

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


@dataclass(frozen=True)
class AttentionOptions:
    """Options of attention.

    Attributes:
        position: learned (a table added to the embeddings), rope or none.
        heads: H.
        bias: of the projections.
        dropout: of the attention map.
    """

    position: str = "learned"
    heads: int = 1
    bias: bool = True
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_counts(self, "heads")
        check_fraction(self, "dropout")
        check_choice(self, "position", POSITIONS)

    @property
    def plain(self) -> Options:
        """The same layer as CAT without filters."""
        return Options(streams=None, **dataclasses.asdict(self))


class SoftmaxAttention(ConvolvedAttention):
    """CAT without filters, with learned, rotary or no positions: Zoology's layer, one head."""

    name = "attention"
    Options = AttentionOptions
    layers = 2


@dataclass(frozen=True)
class LandmarkOptions(Options):
    """Options of Landmark CAT, beside CAT's.

    Attributes:
        block: b, the keys of a block.
        top_k: the blocks that a query chooses.
        local: the blocks near the query that it always reads, its own being one.
        sink: whether the first block is always read too.
        landmark_filter: box, exponential or learned.
        share: who chooses: each head, or the whole layer.
        training: guided, all keys and a loss for the landmarks; dense, all keys; hard, chosen
            blocks, as afterwards.
    """

    block: int = 16
    top_k: int = 4
    local: int = 2
    sink: bool = False
    landmark_filter: str = "box"
    share: str = "head"
    training: str = "guided"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "training", landmark.WAYS)
        check_counts(self, "block", "top_k", "local")
        for problem in landmark.value_problems(self.of_landmarks):
            raise ValueError(problem.replace("filter=", "landmark_filter=", 1))
        if self.mixes_maps:
            raise ValueError("conv_mixing=maps: cannot be combined with landmark attention")
        if landmark.is_sharp(self.landmark_filter) and self.training != "guided":
            raise ValueError(
                f"training={self.training}: gives the landmarks' parameters no gradient; choose "
                "guided"
            )

    @property
    def of_landmarks(self) -> dict[str, Any]:
        """The options that the pattern of attention has too, by its names."""
        names = ("block", "top_k", "local", "sink", "share")
        return {name: getattr(self, name) for name in names} | {"filter": self.landmark_filter}


class LandmarkAttention(ConvolvedAttention):
    """Attention over convolved streams to the blocks of keys that landmarks find.

    `cat_lm.model.attention.modules.landmark` has the equations.
    """

    name = "landmark"
    Options = LandmarkOptions
    own_loss = "landmark_loss"

    def attention_settings(self, options: LandmarkOptions) -> dict[str, Any]:
        chosen = {"attention": "landmark", "attention_options": options.of_landmarks}
        return super().attention_settings(options) | chosen

    def build(self, options: LandmarkOptions, setting: Setting) -> nn.Module:
        layer = super().build(options, setting)
        layer.core.training_by, layer.core.rows = options.training, landmark.USUAL_ROWS
        return layer


@dataclass(frozen=True)
class MultiTokenOptions:
    """Options of multi-token attention.

    Attributes:
        heads: H.
        bias: of the projections.
        dropout: of the attention map.
        query_window, key_window: c_q and c_k, the second one odd.
        head_mixing: where maps are mixed over heads: none, before the softmax, after it, both.
    """

    heads: int = 1
    bias: bool = True
    dropout: float = 0.1
    query_window: int = multi_token.DEFAULTS["query_window"]
    key_window: int = multi_token.DEFAULTS["key_window"]
    head_mixing: str = multi_token.DEFAULTS["head_mixing"]

    def __post_init__(self) -> None:
        check_counts(self, "heads")
        check_fraction(self, "dropout")
        if problems := multi_token.option_problems(**self.kernel):
            raise ValueError(problems[0])

    @property
    def plain(self) -> Options:
        """The layer around the scores, CAT's without filters."""
        return Options(streams=None, heads=self.heads, bias=self.bias, dropout=self.dropout)

    @property
    def kernel(self) -> dict[str, Any]:
        """The options of the kernel and of what mixes heads."""
        return {name: getattr(self, name) for name in multi_token.DEFAULTS}


class MultiTokenAttention(ConvolvedAttention):
    """Softmax attention whose scores are convolved over queries and keys, and its maps over heads.

    Exactly, for rows of at most 512 tokens (Golovneva et al., 2025), by the equations of
    `cat_lm.ops.convolution.multi_token`. The rest is `attention`'s layer, without positions.
    """

    name = "multi-token"
    Options = MultiTokenOptions
    longest = multi_token.LONGEST

    def attention_settings(self, options: MultiTokenOptions) -> dict[str, Any]:
        chosen = {"attention": "multi_token", "attention_options": options.kernel}
        return super().attention_settings(options) | chosen | {"_attn_implementation": "eager"}


ENTRY = ConvolvedAttention()
ATTENTION = (SoftmaxAttention(), LandmarkAttention(), MultiTokenAttention())


def pattern_mixers(known: Collection[str]) -> list[MixerKind]:
    """Make the mixers that patterns of attention are, but for `known` ones.

    A pattern whose options have names of CAT's, or defaults that no text can give, is none.
    """
    # Softmax is the mixer `attention`, and mixed maps are an option of `cat`.
    known, found = {*known, "softmax", "map-mixing"}, []
    for pattern in map(PATTERNS.get, PATTERNS.names()):
        is_plain = all(isinstance(value, int | float | str) for value in pattern.options.values())
        is_new = pattern.name.replace("_", "-") not in known
        if is_new and is_plain and not set(pattern.options) & set(Options.__dataclass_fields__):
            found.append(PatternAttention(pattern))
    return found
