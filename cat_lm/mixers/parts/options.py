"""Options that several mixers have, and the settings of streams and attention that they stand for.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.long_filter import filters


def check_counts(options: object, *names: str) -> None:
    """Check options that count something. Raises ValueError."""
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)}: must be at least 1")


def check_positive(options: object, *names: str) -> None:
    """Check options that multiply a width. Raises ValueError."""
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{name}={getattr(options, name)}: must be a number above 0")


def check_choice(options: object, name: str, choices: tuple[str, ...]) -> None:
    """Check an option that is one of few words. Raises ValueError."""
    if (value := getattr(options, name)) not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def check_heads(heads: int, words: str, *channels: int) -> None:
    """Check that heads divide some numbers of channels, named by `words`. Raises ValueError."""
    if any(count % heads or count < 1 for count in channels):
        raise ValueError(f"heads={heads} do not divide {words}")


@dataclass(frozen=True)
class FilterOptions:
    """Which streams are convolved by how many taps.

    Attributes:
        streams: any of q, k, v, such as qkv or k; none for no convolution.
        window: W.
        conv_type: head, one filter for each head; depthwise, one for each channel; multihead, one
            for each pair of heads (MH-CAT); or a kind of one's own.
        init: uniform, ±1/√W (multihead: ±1/√(W H)), torch's own for a convolution, which the
            authors' code bases leave as it is; or identity, which starts as the model without
            filters.
        activation: none, or silu, of all three streams after the filters.
        heads: H.
        shared_kv: whether keys and values have one projection, K = V before the filters.
    """

    streams: str | None = STREAMS
    window: int = 3
    conv_type: str = "head"
    init: str = "uniform"
    activation: str = "none"
    heads: int = 1
    shared_kv: bool = False

    def __post_init__(self) -> None:
        streams = self.streams or ""
        if len(set(streams)) != len(streams) or not set(streams) <= set(STREAMS):
            raise ValueError(f"streams={streams!r}: must be any of q, k, v, or none")
        check_counts(self, "window", "heads")
        kinds.get(self.conv_type)
        check_choice(self, "init", ("uniform", "identity"))
        check_choice(self, "activation", ("none", "silu"))


@dataclass(frozen=True)
class ConvolutionOptions(FilterOptions):
    """All options of convolved streams.

    Attributes:
        place: after the projection, or before it, on the layer's input. With one filter for a
            whole head and no bias the two are the same function.
        filter: taps; or exponential, ssm: filters as long as the row (`cat_lm.ops.long_filter`).
        filter_state: N, the numbers of state of such a filter for each channel.
        bias: of the projections.
    """

    place: str = "after"
    filter: str = filters.TAPS
    filter_state: int | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "filter", (filters.TAPS, *filters.names()))
        if self.filter_state is not None:
            check_counts(self, "filter_state")
        keys = ("filter", "filter_state")
        for problem in filters.problems(self.filter, self.filter_state or 0, self.conv_type, keys):
            raise ValueError(problem)
        if self.filter != filters.TAPS and self.window != ConvolutionOptions.window:
            raise ValueError(
                f"window={self.window}: is for taps, of which filter={self.filter} has none; leave "
                "it out"
            )
        check_choice(self, "place", ("after", "before"))
        if self.place == "before" and self.heads > 1:
            raise ValueError("place=before needs heads=1: before the projection there are no heads")


@dataclass(kw_only=True, repr=False, eq=False)
class StreamSettings(AttentionSettings):
    """The settings of a mixer's streams and attention, as a configuration has them.

    Attributes:
        value_width: channels of a head of values; None for those of queries and keys.
    """

    hidden_size: int
    num_attention_heads: int
    value_width: int | None = None
    attention_dropout: float = 0.0
    position_embedding: str = "none"
    rope_parameters: dict[str, Any] | None = None
    _attn_implementation: str = "sdpa"
    # `cat_lm.mixers.parts.base` says what padding in a mixer's row means.
    reads_padding: ClassVar[bool] = True
    takes_gaps: ClassVar[bool] = True
    keeps_padding: ClassVar[bool] = False

    def stream_width(self, stream: str) -> int:
        """Return the channels of a stream's heads."""
        return self.value_width if stream == "v" and self.value_width else self.head_width


def stream_settings(options: FilterOptions, width: int, **others: Any) -> StreamSettings:
    """Make the settings that options stand for, and others, in a layer of `width` channels."""
    convolved = {"conv_type": "none"}
    if options.streams:
        convolved = {"conv_type": options.conv_type, "conv_streams": options.streams}
    return StreamSettings(
        hidden_size=width,
        num_attention_heads=options.heads,
        conv_window=options.window,
        conv_init=options.init,
        conv_filter=getattr(options, "filter", filters.TAPS),
        conv_state=getattr(options, "filter_state", None) or 0,
        **convolved,
        **others,
    )
