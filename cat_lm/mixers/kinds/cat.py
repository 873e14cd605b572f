"""CAT: softmax attention over convolved queries, keys and values (Definition 1 of the paper).

Without position embeddings by default. The rest is Zoology's attention layer: a projection with
bias, dropout 0.1 on the attention map, an output projection with bias. Linear attention over the
same streams is LinCAT, with φ = elu + 1, normalised: the paper does not state its φ; this is
Zoology's.

Every pattern of attention is a mixer as well, CAT with this pattern by its name. Three have options
of their own: softmax, as the mixer `attention`, landmark attention and multi-token attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.mixers.parts import base
from cat_lm.model import attention
from cat_lm.model.attention import PATTERNS, Pattern
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution import multi_token_options as multi_token
from cat_lm.ops.landmark import options as landmark

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(base.ConvolutionOptions):
    """Options of CAT.

    Attributes:
        dropout: the dropout of the attention map.
        position: none; learned, a table added to the embeddings; rope, after the filters.
        conv_mixing: what a multihead convolution of the values mixes: embeddings, their heads; or
            maps, the attention maps over heads and keys (see `MapMixingCore`).
    """

    dropout: float = 0.1
    position: str = "none"
    conv_mixing: str = "embeddings"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        base.check_choice(self, "position", ("none", "learned", "rope"))
        base.check_choice(self, "conv_mixing", ("embeddings", "maps"))
        mixes_heads = kinds.mixes_heads(self.conv_type)
        if self.conv_mixing == "maps" and not (mixes_heads and "v" in (self.streams or "")):
            raise ValueError(
                "conv_mixing=maps: needs conv_type=multihead and the stream v, whose filters mix "
                f"the maps; not conv_type={self.conv_type}, streams={self.streams or 'none'}"
            )


def without_filters(options: Any) -> Options:
    """Return CAT's options from those of another class; without a field `streams`, no filters.

    Raises:
        ValueError: the options contradict each other.
    """
    known = Options.__dataclass_fields__
    own = {key: value for key, value in vars(options).items() if key in known}
    return Options(**{"streams": None} | own)


class ConvolvedLinearAttention(base.MixerKind):
    """Linear attention over convolved streams."""

    name = "lincat"
    Options = base.ConvolutionOptions
    layers = 1
    supports = base.ALL

    def check(self, options: Any, setting: base.Setting) -> None:
        base.check_heads(options.heads, f"d_model={setting.d_model}", setting.d_model)

    def build(self, options: Any, setting: base.Setting) -> nn.Module:
        from cat_lm.mixers.parts.linear import LinearAttention

        return LinearAttention(without_filters(options), setting.d_model)


@dataclass(frozen=True)
class HeadOptions:
    """Options of a layer without filters.

    Attributes:
        heads: H.
        bias: the bias of the projections.
    """

    heads: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        without_filters(self)


class LinearAttention(ConvolvedLinearAttention):
    """LinCAT without filters."""

    name = "linear-attention"
    Options = HeadOptions
    layers = 2


class AttentionMixer(base.MixerKind):
    """Attention over convolved streams by a pattern of `cat_lm.model.attention`.

    Args:
        pattern: the attention pattern, whose options have the same names here.
        options: a class that `without_filters` understands.
    """

    supports = base.ALL

    def __init__(self, name: str, pattern: Pattern, options: type, layers: int = 1) -> None:
        self.name, self.pattern, self.Options, self.layers = name, pattern, options, layers
        self.longest, self.computes_on_cpu = pattern.longest, pattern.computes_on_cpu
        # The class belongs to the plugin if the pattern does.
        self.__module__ = type(pattern).__module__

    def learned_positions(self, options: Any) -> bool:
        return without_filters(options).position == "learned"

    def check(self, options: Any, setting: base.Setting) -> None:
        width, heads = setting.d_model, options.heads
        base.check_heads(heads, f"d_model={width}", width)
        if without_filters(options).position == "rope" and width % (2 * heads):
            raise ValueError(f"position=rope: d_model={width} gives odd heads")
        settings = self.settings(options, width)
        if problems := attention.problems(settings, settings._attn_implementation):
            raise ValueError(problems[0])

    def pattern_options(self, options: Any) -> dict[str, Any]:
        return {name: getattr(options, name) for name in self.pattern.options}

    def settings(self, options: Any, width: int) -> base.StreamSettings:
        known, able = without_filters(options), self.pattern.implementations
        return base.stream_settings(
            known,
            width,
            attention=self.pattern.name,
            attention_options=self.pattern_options(options),
            attention_dropout=known.dropout,
            conv_mixing=known.conv_mixing,
            position_embedding="rope" if known.position == "rope" else "none",
            _attn_implementation="sdpa" if able is None or "sdpa" in able else min(able),
        )

    def build(self, options: Any, setting: base.Setting) -> nn.Module:
        from cat_lm.mixers.parts.attention import Attention

        return Attention(without_filters(options), self.settings(options, setting.d_model))

    def layout_settings(self, options: Any, width: int) -> base.StreamSettings:
        settings = self.settings(options, width)
        # A language model builds the layout of its rows itself.
        settings.takes_gaps, settings.keeps_padding = False, True
        return settings

    def cache_layer(self, options: Any) -> type:
        from cat_lm.model.cache import StateDynamicLayer

        own = attention.pattern(self.settings(options, options.heads)).cache_layers()
        return StateDynamicLayer if own is None else own[0]


@dataclass(frozen=True)
class AttentionOptions:
    """Options of softmax attention without filters: Zoology's layer, one head.

    Attributes:
        position: learned (a table added to the embeddings), rope or none.
        heads, bias: as of `HeadOptions`.
        dropout: the dropout of the attention map.
    """

    position: str = "learned"
    heads: int = 1
    bias: bool = True
    dropout: float = 0.1

    def __post_init__(self) -> None:
        without_filters(self)


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
        base.check_choice(self, "training", landmark.WAYS)
        base.check_counts(self, "block", "top_k", "local")
        for problem in landmark.value_problems(self.of_landmarks):
            raise ValueError(problem.replace("filter=", "landmark_filter=", 1))
        if self.conv_mixing == "maps":
            raise ValueError("conv_mixing=maps: cannot be combined with landmark attention")
        if landmark.is_sharp(self.landmark_filter) and self.training != "guided":
            problem = "gives the landmarks' parameters no gradient; choose guided"
            raise ValueError(f"training={self.training}: {problem}")

    @property
    def of_landmarks(self) -> dict[str, Any]:
        """Return the options that the attention pattern has too, under its names."""
        names = ("block", "top_k", "local", "sink", "share")
        return {name: getattr(self, name) for name in names} | {"filter": self.landmark_filter}


class LandmarkAttention(AttentionMixer):
    """Attention over convolved streams to the blocks of keys that landmarks find.

    `cat_lm.model.attention.modules.landmark` has the equations.
    """

    own_loss = "landmark_loss"

    def pattern_options(self, options: LandmarkOptions) -> dict[str, Any]:
        return options.of_landmarks

    def build(self, options: LandmarkOptions, setting: base.Setting) -> nn.Module:
        layer = super().build(options, setting)
        layer.core.training_by, layer.core.rows = options.training, landmark.USUAL_ROWS
        return layer


@dataclass(frozen=True)
class MultiTokenOptions(HeadOptions):
    """Options of multi-token attention; the layer has neither filters nor positions.

    Exactly, for rows of at most 512 tokens (Golovneva et al., 2025), by the equations of
    `cat_lm.ops.convolution.multi_token`.

    Attributes:
        dropout: the dropout of the attention map.
        query_window, key_window: c_q and c_k, the second one odd.
        head_mixing: where maps are mixed over heads: none, before the softmax, after it, both.
    """

    dropout: float = 0.1
    query_window: int = multi_token.DEFAULTS["query_window"]
    key_window: int = multi_token.DEFAULTS["key_window"]
    head_mixing: str = multi_token.DEFAULTS["head_mixing"]

    def __post_init__(self) -> None:
        super().__post_init__()
        kernel = {name: getattr(self, name) for name in multi_token.DEFAULTS}
        if problems := multi_token.option_problems(**kernel):
            raise ValueError(problems[0])


_SOFTMAX = PATTERNS.get("softmax")
ENTRY = AttentionMixer("cat", _SOFTMAX, Options)
OTHERS = (
    AttentionMixer("attention", _SOFTMAX, AttentionOptions, layers=2),
    LandmarkAttention("landmark", PATTERNS.get("landmark"), LandmarkOptions),
    AttentionMixer("multi-token", PATTERNS.get("multi_token"), MultiTokenOptions),
    ConvolvedLinearAttention(),
    LinearAttention(),
)


def pattern_mixers(known: Collection[str]) -> list[base.MixerKind]:
    """Return a mixer for each attention pattern that is not in `known`.

    A pattern whose options have names of CAT's, or defaults that no text can give, is none.
    """
    # Softmax is already the mixer `attention`, and map mixing is an option of `cat`.
    known, found = {*known, "softmax", "map-mixing"}, []
    for pattern in map(PATTERNS.get, PATTERNS.names()):
        name, values = pattern.name.replace("_", "-"), pattern.options
        is_plain = all(isinstance(value, int | float | str) for value in values.values())
        if name not in known and is_plain and not set(values) & set(Options.__dataclass_fields__):
            own = [(option, type(value), value) for option, value in values.items()]
            made = dataclasses.make_dataclass("Options", own, bases=(Options,), frozen=True)
            found.append(AttentionMixer(name, pattern, made))
    return found
