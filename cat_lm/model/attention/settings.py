"""Settings of attention and its convolutions, which configurations of every family share.

The modules of `cat_lm.model` read them here and know no family's configuration by type. This
module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from cat_lm.core.registry import Registry
from cat_lm.model import attention
from cat_lm.model.rules import (
    DEFAULT_WINDOW,
    STREAMS,
    canon_places,
    canon_problems,
    convolution_problems,
    filter_problems,
    has_long_filters,
    mixes_maps,
    norm_problems,
    rank_problems,
)
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters

CONV_MIXINGS = ("embeddings", "maps")
CONV_ACTIVATIONS = ("none", "silu")
CONV_INITS = ("identity", "uniform", "residual")
CANON_INITS = ("uniform", "zero")
CONV_NORMS = ("none", "l1")
QK_NORMS = ("none", "l2", "rms")
QK_NORM_PLACES = ("after", "before")
POSITION_EMBEDDINGS = ("rope", "none")


@dataclass(kw_only=True, repr=False, eq=False)
class AttentionSettings:
    """Hold what convolution-augmented attention adds to a configuration of transformers.

    A family's configuration extends this and its own of the library, and says the meaning of the
    fields in its docstring.

    Attributes:
        attends: whether layers have attention, which takes masks.
        library_names: patterns of parameters' names in the library's files, and what takes their
            place.
        convolved_names: the same, of models with convolutions only.
    """

    attends: ClassVar[bool] = True
    library_names: ClassVar[dict[str, str]] = {}
    convolved_names: ClassVar[dict[str, str]] = {}

    conv_type: str = "head"
    conv_window: int = DEFAULT_WINDOW
    conv_streams: str = "qkv"
    conv_mixing: str = "embeddings"
    conv_activation: str = "none"
    conv_init: str = "identity"
    conv_filter: str = "taps"
    conv_state: int = 0
    conv_norm: str = "none"
    conv_rank: int = 1
    qk_norm: str = "none"
    qk_norm_place: str = "after"
    canon: str = "none"
    canon_window: int = 4
    canon_init: str = "uniform"
    position_embedding: str = "rope"
    attention_temperature: float | int = 1.0
    temperature_scope: str = "logits"
    attention: str = "softmax"
    attention_options: dict[str, Any] | None = None
    score_transform: str = "none"
    score_options: dict[str, Any] | None = None
    value_transform: str = "none"
    value_options: dict[str, Any] | None = None

    @classmethod
    def other_keys(cls) -> Collection[str]:
        """Return the keys that are stored in `rope_parameters`."""
        return ("rope_theta", "partial_rotary_factor")

    @classmethod
    def renamings(cls, convolved: bool) -> dict[str, str]:
        """Return the patterns for the files of models with or without convolutions."""
        return cls.library_names | (cls.convolved_names if convolved else {})

    @property
    def head_width(self) -> int:
        """D, the channels of a head."""
        width = getattr(self, "head_dim", None)
        return width or self.hidden_size // self.num_attention_heads

    def stream_width(self, stream: str) -> int:
        """Return the channels of a stream's heads."""
        return self.head_width

    def stream_heads(self, stream: str) -> int:
        """Return the number of heads of a stream, which for keys and values may be fewer."""
        shared = getattr(self, "num_key_value_heads", None)
        return self.num_attention_heads if stream == "q" or shared is None else shared

    @property
    def convolved_streams(self) -> str:
        """The streams that have filters, in the order q, k, v; empty without convolutions."""
        if self.conv_type == "none":
            return ""
        return "".join(stream for stream in STREAMS if stream in self.conv_streams)

    @property
    def has_long_filters(self) -> bool:
        """Return True if filters are as long as the text, and kept as a state when decoding."""
        return has_long_filters(self)

    @property
    def mixes_maps(self) -> bool:
        """Return True if the values' filters mix attention maps."""
        return mixes_maps(self)

    @property
    def embedding_streams(self) -> str:
        """The streams that are convolved before attention, and need their past when decoding."""
        streams = self.convolved_streams
        return streams.replace("v", "") if self.mixes_maps else streams

    @property
    def needs_layer_state(self) -> bool:
        """Return True if a cache must hold more than keys and values."""
        if self.embedding_streams and (self.has_long_filters or self.conv_window > 1):
            return True
        if canon_places(self) and self.canon_window > 1:
            return True
        entries = attention.pattern(self), attention.value_transform(self)
        return any(entry is not None and entry.holds_state(self) for entry in entries)

    @property
    def reads_positions(self) -> bool:
        """Return True if attention reads positions of queries and keys, not their order alone."""
        return self.score_transform != "none" or attention.pattern(self).reads_positions

    @property
    def cache_layers(self) -> tuple[type, type] | None:
        """Return the classes of cache layers that the pattern of attention brings, if it does."""
        return attention.pattern(self).cache_layers()

    @property
    def masks_keys(self) -> bool:
        """Return True if the pattern of attention takes padding and documents, and no mask."""
        return attention.pattern(self).masks_keys

    @property
    def reads_padding(self) -> bool:
        """Return True if anything but a mask must know padding."""
        convolves = bool(self.convolved_streams or canon_places(self))
        convolves = convolves or self.value_transform != "none"
        return convolves or self.reads_positions or self.masks_keys

    @property
    def takes_gaps(self) -> bool:
        """Return True if padding may stand between a row's tokens: no layer reads neighbours."""
        return not (self.needs_layer_state or attention.pattern(self).reads_neighbours(self))

    @property
    def keeps_padding(self) -> bool:
        """Return True if states hold what was read as padding; else masks say it at each call."""
        return self.needs_layer_state

    def check_attention_settings(self) -> None:
        """Check the fields above, but for the temperature. Raises ValueError."""
        if self.conv_type != "none":
            check_choice("conv_init", self.conv_init, CONV_INITS)
        check_choice("canon_init", self.canon_init, CANON_INITS)
        check_entry_name("conv_type", self.conv_type, kinds.KINDS)
        check_choice("position_embedding", self.position_embedding, POSITION_EMBEDDINGS)
        check_choice("conv_mixing", self.conv_mixing, CONV_MIXINGS)
        check_choice("conv_activation", self.conv_activation, CONV_ACTIVATIONS)
        check_entry_name("conv_filter", self.conv_filter, filters.FILTERS)
        check_choice("conv_norm", self.conv_norm, CONV_NORMS)
        check_choice("qk_norm", self.qk_norm, QK_NORMS)
        check_choice("qk_norm_place", self.qk_norm_place, QK_NORM_PLACES)
        refuse(filter_problems(self))
        refuse([*convolution_problems(self), *norm_problems(self), *rank_problems(self)])
        refuse(canon_problems(self))
        attention.check_names(self)
        refuse(attention.problems(self))


def check_entry_name(key: str, name: str, registry: Registry) -> None:
    """Check that a registry has a name. Raises ValueError."""
    if problem := registry.problem(name):
        raise ValueError(f"{key}={name!r}: {problem}")


def check_choice(name: str, value: str, supported: tuple[str, ...]) -> None:
    """Check that a value is among those supported. Raises ValueError."""
    if value not in supported:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(supported)}")


def refuse(problems: list[str]) -> None:
    """Raise ValueError with the first of the problems, if there are any."""
    if problems:
        raise ValueError(problems[0])
