"""The base class of sequence mixers, which imports no torch, and their options.

The module that a mixer builds is causal and takes

    forward(x, context) -> y

with x and y [B, T, C] and a `cat_lm.model.context.Context`, of which it reads what its kind
`supports`; the rest is None:

- documents: `context.documents` [B, T]; where the id changes a document starts, which reads no
  other.
- padding: `context.padding` [B, T] bool, False at padding: no real token reads what is there, and
  it leaves the state exactly as it was. To the left and the right of a call's real tokens it is as
  if it were not there. Between them it keeps its place: convolutions read zeros there. Attention
  that reads keys in blocks or side by side refuses gaps, and landmark attention tokens after
  padding at a row's end, by a ValueError. What comes out at padding is anything finite.
- state: `context.state`, a layer of a cache (`cat_lm.model.cache`), empty before the first tokens,
  holds the module's decoding state after each call. Calls with the parts of a sequence give what
  one call with all of it gives. Not with documents.

A module whose `adds_losses` is true has a loss of its own in training, a number, which it appends
to the list `context.losses`, unless that is None. How parameters start and which take no weight
decay, a module says as in `cat_lm.core.parameters`; recall, whose recipe is Zoology's, decays all.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.core.errors import UserError
from cat_lm.core.fields import changed_options
from cat_lm.core.plugins import is_own
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.long_filter import filters

if TYPE_CHECKING:
    from torch import nn

CAPABILITIES = ("documents", "padding", "state")
ALL = frozenset(CAPABILITIES)


@dataclass(frozen=True)
class Setting:
    """The position of a mixer in a model: width C, layer index (from 0), and number of layers."""

    d_model: int
    layer: int = 0
    num_layers: int = 1


class MixerKind:
    """A type of mixer; an instance of each subclass is registered.

    Attributes:
        name: as in `model.mixer` and before the colon of a specification.
        Options: a frozen dataclass of plain values, see cat_lm/core/fields.py.
        layers: that the paper's comparison gives it.
        block: the type of block in eval/recall/model.py, `layer` or `rms`.
        longest: tokens of the longest row that its module takes; None for any.
        own_loss: the name of the loss that its module adds in training, in metrics.
        supports: those of CAPABILITIES that its module reads.
        computes_on_cpu: whether its module can be computed on a CPU; one of a plugin that can is
            checked for causality when it is first built.
    """

    name: ClassVar[str]
    Options: ClassVar[type]
    layers: ClassVar[int] = 2
    block: ClassVar[str] = "layer"
    longest: ClassVar[int | None] = None
    own_loss: ClassVar[str] = "auxiliary_loss"
    supports: ClassVar[frozenset[str]] = frozenset()
    computes_on_cpu: ClassVar[bool] = True

    def learned_positions(self, options: Any) -> bool:
        """Return True if a learned table of positions is added to the embeddings."""
        return False

    def check(self, options: Any, setting: Setting) -> None:
        """Check the options against the width. Raises ValueError."""

    def build(self, options: Any, setting: Setting) -> nn.Module:
        """Build the module of one layer; imports torch."""
        raise NotImplementedError

    def layout_settings(self, options: Any, width: int) -> Any | None:
        """Return the settings by which a model's body prepares masks and positions, or None."""
        return None

    def cache_layer(self, options: Any) -> type:
        """Import the class of a layer's growing cache; see `cat_lm.model.cache`."""
        from cat_lm.model.cache import RecurrentLayer

        return RecurrentLayer


@dataclass(frozen=True)
class Mixer:
    """A mixer with its options."""

    kind: MixerKind
    options: Any

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def layers(self) -> int:
        return self.kind.layers

    @property
    def learned_positions(self) -> bool:
        return self.kind.learned_positions(self.options)

    @property
    def label(self) -> str:
        """Return `name` or `name:key=value,…`, with the options that differ from the defaults."""
        changed = ",".join(f"{k}={v}" for k, v in changed_options(self.options).items())
        return f"{self.name}:{changed}" if changed else self.name

    def describe(self) -> dict[str, Any]:
        """Return the label and all options, as plain values."""
        return {"label": self.label, "options": asdict(self.options)}

    def check(self, setting: Setting) -> None:
        """Check the options against the width. Raises UserError."""
        try:
            self.kind.check(self.options, setting)
        except ValueError as error:
            raise UserError(f"mixer {self.label}: {error}") from None

    def build(self, setting: Setting) -> nn.Module:
        """Build one layer's module.

        Raises:
            UserError: options that do not fit the width, or a module that does not say what it must
                of its parameters; of a mixer that is not ours, one that reads later tokens.
        """
        from cat_lm.core.parameters import check_parameters  # This import loads torch.

        self.check(setting)
        try:
            module = self.kind.build(self.options, setting)
            check_parameters(module)
        except ValueError as error:
            raise UserError(f"mixer {self.label}: {error}") from None
        if self.kind.computes_on_cpu and not is_own(self.kind):
            self._check_causal(setting)
        return module

    def _check_causal(self, setting: Setting) -> None:
        from cat_lm.core import causality  # This import loads torch.
        from cat_lm.core.parameters import apply_initial_values
        from cat_lm.model.context import Context

        # All later layers are like the second.
        setting = replace(setting, layer=min(setting.layer, 1))

        def make() -> tuple[nn.Module, Any, int]:
            module = self.kind.build(self.options, setting).eval()
            module.apply(apply_initial_values)
            return module, lambda x: module(x, Context()), setting.d_model

        # The key has the kind's id, because its class may define `==`.
        key = (id(self.kind), self.options, setting)
        causality.check_causal(f"mixer {self.label}", key, make)


# Options, and the attention settings that they stand for


def check_counts(options: object, *names: str) -> None:
    """Check that counting options are at least 1. Raises ValueError."""
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)}: must be at least 1")


def check_positive(options: object, *names: str) -> None:
    """Check that width factors are positive. Raises ValueError."""
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{name}={getattr(options, name)}: must be a number above 0")


def check_choice(options: object, name: str, choices: tuple[str | int, ...]) -> None:
    """Check that an option has one of its few values. Raises ValueError."""
    if (value := getattr(options, name)) not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")


def check_heads(heads: int, words: str, *channels: int) -> None:
    """Check that `heads` divides the channels that `words` describes. Raises ValueError."""
    if any(count % heads or count < 1 for count in channels):
        raise ValueError(f"heads={heads} do not divide {words}")


@dataclass(frozen=True)
class FilterOptions:
    """Options that name the convolved streams and the taps of their filters.

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
        bias: the bias of the projections.
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
            raise ValueError(f"window={self.window}: is for taps, not filter={self.filter}")
        check_choice(self, "place", ("after", "before"))
        if self.place == "before" and self.heads > 1:
            raise ValueError("place=before needs heads=1: before the projection there are no heads")


@dataclass(kw_only=True, repr=False, eq=False)
class StreamSettings(AttentionSettings):
    """The attention settings of a mixer, in the form that a configuration has them.

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
    # The comment above defines what padding in a mixer's row means.
    reads_padding: ClassVar[bool] = True
    takes_gaps: ClassVar[bool] = True
    keeps_padding: ClassVar[bool] = False

    def stream_width(self, stream: str) -> int:
        """Return the channels of a stream's heads."""
        return self.value_width if stream == "v" and self.value_width else self.head_width


def stream_settings(options: FilterOptions, width: int, **others: Any) -> StreamSettings:
    """Build the settings for options and overrides, in a layer of `width` channels."""
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
