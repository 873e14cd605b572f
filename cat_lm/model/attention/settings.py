"""Settings of attention and its convolutions that configurations of every family share.

The modules of `cat_lm.model` read them here and know no family's configuration by type. This
module imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cat_lm.model import attention, rules
from cat_lm.model.rules import DEFAULT_WINDOW, STREAMS, canon_places, key_heads


@dataclass(kw_only=True, repr=False, eq=False)
class AttentionSettings:
    """The fields that convolution-augmented attention adds to a transformers configuration.

    A family's configuration extends this and its own of the library.

    Attributes:
        attends: whether layers have attention, which takes masks.
        library_names: patterns of parameters' names in the library's files, and what takes their
            place.
        convolved_names, plain_names: the same, of models with convolutions only, and of others.
    """

    attends: ClassVar[bool] = True
    library_names: ClassVar[dict[str, str]] = {}
    convolved_names: ClassVar[dict[str, str]] = {}
    plain_names: ClassVar[dict[str, str]] = {}

    conv_type: str = "head"
    conv_options: dict[str, Any] | None = None
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
        """Return the renaming patterns for files of models with or without convolutions."""
        return cls.library_names | (cls.convolved_names if convolved else cls.plain_names)

    head_width = property(rules.head_width)
    has_long_filters = property(rules.has_long_filters)
    mixes_maps = property(rules.mixes_maps)

    def stream_width(self, stream: str) -> int:
        """Return the channels of a stream's heads."""
        return self.head_width

    def stream_heads(self, stream: str) -> int:
        """Return the heads of a stream's filters; keys and values may have fewer, except with map
        mixing.
        """
        of_maps = stream == "v" and self.mixes_maps
        return self.num_attention_heads if stream == "q" or of_maps else key_heads(self)

    @property
    def convolved_streams(self) -> str:
        """Return the streams with filters, in the order q, k, v; empty without convolutions."""
        if self.conv_type == "none":
            return ""
        return "".join(stream for stream in STREAMS if stream in self.conv_streams)

    @property
    def embedding_streams(self) -> str:
        """Return the streams convolved before attention, which need earlier inputs in decoding."""
        streams = self.convolved_streams
        return streams.replace("v", "") if self.mixes_maps else streams

    @property
    def needs_layer_state(self) -> bool:
        """Return True if a cache must hold more than keys and values."""
        if self.embedding_streams and (self.has_long_filters or self.conv_window > 1):
            return True
        if canon_places(self) and self.canon_window > 1:
            return True
        return any(entry.holds_state(self) for entry in attention.chosen_entries(self).values())

    @property
    def reads_positions(self) -> bool:
        """Return True if attention reads positions of queries and keys, not only their order."""
        return self.score_transform != "none" or attention.pattern(self).reads_positions

    @property
    def cache_layers(self) -> tuple[type, type] | None:
        """Return the cache layer classes of the attention pattern, see `Pattern.cache_layers`."""
        return attention.pattern(self).cache_layers()

    @property
    def masks_keys(self) -> bool:
        """Return True if the attention pattern takes padding and documents instead of a mask."""
        return attention.pattern(self).masks_keys

    @property
    def reads_padding(self) -> bool:
        """Return True if other parts than the attention mask need to know the padding."""
        convolves = self.convolved_streams or canon_places(self) or self.value_transform != "none"
        return bool(convolves) or self.reads_positions or self.masks_keys

    @property
    def takes_gaps(self) -> bool:
        """Return True if padding may stand between a row's tokens: no layer reads neighbouring
        tokens.
        """
        return not (self.needs_layer_state or attention.pattern(self).reads_neighbours(self))

    @property
    def keeps_padding(self) -> bool:
        """Return True if states record the padding; otherwise the mask of each call gives it."""
        return self.needs_layer_state

    def shape_problems(self) -> list[str]:
        """Return the meaningless combinations of fields."""
        return [*rules.problems(self), *attention.problems(self)]


def refuse(problems: list[str]) -> None:
    """Raise ValueError with the first problem, if there is any."""
    if problems:
        raise ValueError(problems[0])


def rename_parameter(name: str, renamings: Mapping[str, str]) -> str:
    """Rename one parameter by applying the patterns in order."""
    for pattern, replacement in renamings.items():
        name = re.sub(pattern, replacement, name)
    return name
