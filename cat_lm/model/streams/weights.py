"""The operations of a layer's streams, and the parameters that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.sequence import SequenceGroup, own_heads
from cat_lm.model.streams.base import StreamOp
from cat_lm.model.streams.convolution import Bias, Convolution
from cat_lm.model.streams.long_filter import LongFilter
from cat_lm.model.streams.norm import Norm
from cat_lm.model.streams.ranks import Ranks
from cat_lm.model.streams.rotation import Activation, Rotation, Silu
from cat_lm.ops.convolution.kinds import STREAMS

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


def filter_of(config: AttentionSettings) -> Convolution | LongFilter:
    """Make the operation that a configuration's filters are."""
    return LongFilter(config) if config.has_long_filters else Convolution(config)


class StreamWeights(NothingDecays):
    """Holds the filters and biases of a layer's queries, keys and values, and lists what is done.

    A stream with filters is convolved, filtered further where ranks are asked for, activated,
    normalised and rotated, as the configuration says; one without gets its bias in the place of the
    first of these. The norm may come before all of them. (`conv_mixing: maps` uses the values'
    filters otherwise: see `MapMixingCore`.)

    The projections stay plain linear layers, so that what replaces or adapts linear layers (LoRA,
    quantisation) means the same as in any other model. This module holds the filters `q_filter`,
    `k_filter`, `v_filter`, taps with lag 0 first, and the projections' biases, and its forward
    reads no other parameters: whoever gathers a module's parameters before its forward (ZeRO-3,
    FSDP) gathers all that it needs.

    Args:
        biases: of the projections, by the names that they get here; None where there is none. One
            of GPT-NeoX's packed projection is `bias` [3 C], and others `q_bias`, `k_bias`,
            `v_bias`.
        activates: whether all three streams, convolved or not, end in a SiLU.
    """

    def __init__(
        self,
        config: AttentionSettings,
        biases: Mapping[str, nn.Parameter | None],
        activates: bool = False,
    ) -> None:
        super().__init__()
        self.filter, self.streams = filter_of(config), config.convolved_streams
        self.filtered, self.window = config.embedding_streams, self.filter.window
        self.widths = {stream: config.stream_width(stream) for stream in STREAMS}
        self.is_packed, self.mixes_maps = "bias" in biases, config.mixes_maps
        self.norm_comes_first = config.qk_norm_place == "before"
        self.operations = {s: tuple(self._of(config, s, activates)) for s in STREAMS}
        for name, bias in biases.items():
            self.register_parameter(name, bias)
        for op, named in ((self.filter, self.streams), *((ranks, "qk") for ranks in self.ranks)):
            for stream in named:
                self.register_parameter(f"{stream}_{op.name}", nn.Parameter(op.initial(stream)))

    def _of(self, config: AttentionSettings, stream: str, activates: bool) -> list[StreamOp]:
        """List a stream's operations in their order."""
        is_filtered, meets_keys = stream in self.filtered, stream in "qk"
        normalizes = config.qk_norm != "none" and not self.norm_comes_first
        rotates = config.position_embedding == "rope"
        return [
            self.filter if is_filtered else Bias(),
            *([Ranks(self.filter)] if meets_keys and config.conv_rank > 1 else []),
            *([Silu()] if is_filtered and config.conv_activation == "silu" else []),
            *([Norm()] if meets_keys and normalizes else []),
            *([Rotation(self.widths[stream])] if meets_keys and rotates else []),
            *([Activation()] if activates else []),
        ]

    @property
    def ranks(self) -> list[Ranks]:
        """Return the operation that makes further ranks, if there is one."""
        return [op for op in self.operations["q"] if isinstance(op, Ranks)]

    @property
    def mixes_heads(self) -> bool:
        """Return True if a head's output depends on other heads."""
        return isinstance(self.filter, Convolution) and self.filter.kind.mixes_heads

    def filters(self) -> dict[str, nn.Parameter]:
        """Return the filters of the streams that have them, in the order q, k, v."""
        return {stream: getattr(self, f"{stream}_filter") for stream in self.streams}

    def taps(self, stream: str, group: SequenceGroup | None = None) -> Tensor | None:
        """Return a stream's filters as they are used, of its heads here; None where it has none.

        Args:
            group: the ranks that share the heads.
        """
        filters = getattr(self, f"{stream}_filter", None)
        if filters is None:
            return None
        axis = self.filter.head_axis
        return self.filter.used(filters if axis is None else own_heads(group, filters, axis))

    def biases(self) -> list[nn.Parameter]:
        """Return the projections' biases that there are."""
        return [own for name, own in self.named_parameters(recurse=False) if name.endswith("bias")]
