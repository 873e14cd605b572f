"""Options and counts that several mixers have."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.long_filter import filters

INITS = ("uniform", "identity")
ACTIVATIONS = ("none", "silu")
OPERATORS = ("torch", "fla")


def check_operator(name: str) -> None:
    """Check an option that chooses between our operators and flash-linear-attention's.

    Raises:
        ValueError: an unknown operator, or one of a package that is not here.
    """
    if name not in OPERATORS:
        raise ValueError(f"operator={name!r}: must be torch or fla")
    if name == "fla" and importlib.util.find_spec("fla") is None:
        raise ValueError(
            "operator=fla: fla-core is not installed (pip install fla-core); or use operator=torch"
        )


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


def check_fraction(options: object, name: str) -> None:
    """Check an option that is a share of something. Raises ValueError."""
    if not 0 <= getattr(options, name) < 1:
        raise ValueError(f"{name}={getattr(options, name)}: must be at least 0 and below 1")


def check_streams(streams: str | None) -> None:
    """Check a choice of streams. Raises ValueError."""
    if len(set(streams or "")) != len(streams or "") or not set(streams or "") <= set(STREAMS):
        raise ValueError(f"streams={streams!r}: must be any of q, k, v, or none")


def check_choice(options: object, name: str, choices: tuple[str, ...]) -> None:
    """Check an option that is one of few words. Raises ValueError."""
    if (value := getattr(options, name)) not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def check_filters(options: ConvolutionOptions | DeltaOptions) -> None:
    """Check the options of short filters. Raises ValueError."""
    check_streams(options.streams)
    check_counts(options, "window", "heads")
    kinds.get(options.conv_type)
    check_choice(options, "init", INITS)
    check_choice(options, "activation", ACTIVATIONS)


@dataclass(frozen=True)
class ConvolutionOptions:
    """Which streams are convolved, and how.

    Attributes:
        streams: any of q, k, v, such as qkv or k; none for no convolution.
        window: W.
        conv_type: head, one filter for each head; depthwise, one for each channel; multihead, one
            for each pair of heads (MH-CAT); or a kind of one's own.
        init: uniform, ±1/√W (multihead: ±1/√(W H)), torch's own for a convolution, which the
            authors' code bases leave as it is; or identity, which starts as the model without
            filters.
        activation: none, or silu, of all three streams after the filters.
        place: after the projection, or before it, on the layer's input. With one filter for a
            whole head and no bias the two are the same function.
        heads: H.
        shared_kv: whether keys and values have one projection, K = V before the filters.
        filter: taps; or exponential, ssm: filters as long as the row (`cat_lm.ops.long_filter`).
        filter_state: N, the numbers of state of such a filter for each channel.
    """

    streams: str | None = STREAMS
    window: int = 3
    conv_type: str = "head"
    init: str = "uniform"
    activation: str = "none"
    place: str = "after"
    heads: int = 1
    shared_kv: bool = False
    filter: str = filters.TAPS
    filter_state: int | None = None

    def __post_init__(self) -> None:
        check_filters(self)
        check_choice(self, "filter", (filters.TAPS, *filters.names()))
        if self.filter_state is not None:
            check_counts(self, "filter_state")
        keys = ("filter", "filter_state")
        for problem in filters.problems(self.filter, self.filter_state or 0, self.conv_type, keys):
            raise ValueError(problem)
        if self.long_filter is not None and self.window != ConvolutionOptions.window:
            raise ValueError(
                f"window={self.window}: is for taps, of which filter={self.filter} has none; leave "
                "it out"
            )
        if self.place not in ("after", "before"):
            raise ValueError(f"place={self.place!r}: must be after or before")
        if self.place == "before" and self.heads > 1:
            raise ValueError("place=before needs heads=1: before the projection there are no heads")

    @property
    def long_filter(self) -> filters.LongFilter | None:
        """The kind of filters as long as the row; None for taps."""
        return None if self.filter == filters.TAPS else filters.get(self.filter)


@dataclass(frozen=True)
class DeltaOptions:
    """Options of both delta-rule layers.

    Attributes:
        streams: which of q, k, v pass a short convolution; none: none of them.
        window: W of the short convolutions.
        conv_type: depthwise, one filter for each channel; head, one for each head; multihead, one
            for each pair of heads; or a kind of one's own.
        init: uniform, ±1/√W, torch's own for a convolution; or identity, which changes nothing.
        activation: silu, of all three streams whether convolved or not, or none.
        heads: H.
        shared_kv: whether keys and values have one projection, K = V before the convolutions;
            needs values as wide as keys.
    """

    streams: str | None = STREAMS
    window: int = 4
    conv_type: str = "depthwise"
    init: str = "uniform"
    activation: str = "silu"
    heads: int = 2
    shared_kv: bool = False

    def __post_init__(self) -> None:
        check_filters(self)

    def sizes(self, width: int, expand_v: float) -> dict[str, int]:
        """Return the channels of each stream."""
        return {"q": width, "k": width, "v": int(width * expand_v)}

    def check(self, width: int, expand_v: float) -> None:
        """Check that heads divide keys and values. Raises ValueError."""
        values = self.sizes(width, expand_v)["v"]
        if width % self.heads or values % self.heads or values < 1:
            raise ValueError(f"heads={self.heads} do not divide {width} keys, {values} values")
        if self.shared_kv and values != width:
            raise ValueError(f"shared_kv=true: {values} values but {width} keys; set expand_v=1")
