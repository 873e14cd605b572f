"""Queries, keys and values of mixers by name, with CAT's filters on chosen streams.

The filters are those of language models, `cat_lm.model.streams`; here projections have
their biases before the convolution, as in Zoology's layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.options import ConvolutionOptions, DeltaOptions
from cat_lm.mixers.parts.settings import StreamSettings, stream_settings
from cat_lm.model.context import Context
from cat_lm.model.streams.long_filter import LongFilter
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.long_filter.chunks import taps_of

_SHOWN = 64  # taps of a filter without an end


def make_convolution(settings: StreamSettings, activates: bool = False) -> StreamPipeline | None:
    """Make the filters of the streams that have some, as they start; None without any."""
    if not settings.convolved_streams:
        return None
    convolution = StreamPipeline(settings, {}, activates)
    with torch.no_grad():
        for stream, filters in convolution.filters().items():
            filters.copy_(convolution.filter.drawn(stream))
    return convolution


class Streams(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time."""

    def __init__(self, options: ConvolutionOptions, settings: StreamSettings, bias: bool) -> None:
        super().__init__()
        self.options, self.settings = options, settings
        self.projected = "qkk" if options.shared_kv else STREAMS  # what each stream is made of
        width, different = settings.hidden_size, len(set(self.projected))
        self.projection = nn.Linear(width, different * width, bias=bias)
        activates = options.activation == "silu" and options.place == "after"
        self.convolution = make_convolution(settings, activates)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the streams, and a fourth tensor if maps are mixed, see `with_maps`."""
        of = [STREAMS.index(name) for name in self.projected]
        activation = F.silu if self.options.activation == "silu" else None
        if self.convolution is None:
            made = [self._heads(y) for y in self._projections(x)]
            return tuple(made[i] if activation is None else activation(made[i]) for i in of)
        if self.options.place == "after":
            made = self._projections(x)
            return self.convolution(context, *(made[i] for i in of))
        streams = self._of_filtered(self.convolution(context, x, x, x), of)
        return tuple(streams if activation is None else map(activation, streams))

    def _projections(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.projection(x).unflatten(-1, (-1, x.shape[-1])).unbind(dim=2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.options.heads, -1))

    def _of_filtered(self, inputs: tuple[Tensor, ...], of: list[int]) -> list[Tensor]:
        """Project inputs [B, T, 1, C] that are filtered; `of` names each stream's projection."""
        width, bias = self.settings.hidden_size, self.projection.bias
        weights = self.projection.weight.split(width)
        biases = [None] * len(weights) if bias is None else bias.split(width)
        return [F.linear(x, weights[i], biases[i]) for x, i in zip(inputs, of, strict=True)]


class FilteredStreams:
    """The streams of a delta rule, filtered as its options say; before a `LinearMixer`.

    Args:
        values: channels of all values.
        how: further arguments of the layer.
    """

    def __init__(self, options: DeltaOptions, width: int, values: int, **how: Any) -> None:
        super().__init__(width, options.heads, width, values, **how)
        self.options = options
        if options.shared_kv:
            self.v_proj = None
        value_width = values // options.heads
        self.convolution = make_convolution(
            stream_settings(options, width, value_width=value_width)
        )

    def streams(self, x: Tensor, context: Context) -> list[Tensor]:
        """Make queries, keys and values [B, T, H, D] of x [B, T, C]."""
        query, key = self.q_proj(x), self.k_proj(x)
        value = key if self.v_proj is None else self.v_proj(x)
        if self.convolution is not None:
            made = self.convolution(context, query, key, value)
        else:
            made = map(self.of_heads, (query, key, value))
        return [F.silu(s) if self.options.activation == "silu" else s for s in made]


def filters_as_lists(convolution: StreamPipeline) -> dict[str, list[list[float]]]:
    """Return each stream's filters as [N][W], lag 0 first: N heads, or pairs, or channels.

    Of filters as long as the row the first 64 taps.
    """
    found, own = {}, convolution.filter
    for stream, filters in convolution.filters().items():
        if isinstance(own, LongFilter):
            taps = taps_of(own.kind.modes_of(filters.detach(), own.size), _SHOWN)
        else:
            taps = filters.detach().movedim(own.kind.window_axis, -1)
        found[stream] = taps.reshape(-1, taps.shape[-1]).tolist()
    return found
