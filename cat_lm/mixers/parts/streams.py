"""Queries, keys and values of mixers by name, with CAT's filters on chosen streams.

The filters are those of language models, `cat_lm.model.stream_convolution`; here projections have
their biases before the convolution, as in Zoology's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.options import ConvolutionOptions, DeltaOptions
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.context import Context
from cat_lm.model.convolution import SeparateConvolution
from cat_lm.model.stream_convolution import first_filters
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.long_filter.chunks import taps_of

_SHOWN = 64  # taps of a filter without an end


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
    # What padding in a mixer's row means is said in `cat_lm.mixers.parts.base`.
    takes_gaps: ClassVar[bool] = True
    keeps_padding: ClassVar[bool] = False

    def stream_width(self, stream: str) -> int:
        """Return the channels of a stream's heads."""
        return self.value_width if stream == "v" and self.value_width else self.head_width


def stream_settings(
    options: ConvolutionOptions | DeltaOptions, width: int, **more: Any
) -> StreamSettings:
    """Make the settings that options of filters stand for, in a layer of `width` channels.

    Args:
        more: other settings.
    """
    convolved = {"conv_type": "none"}
    if options.streams:
        convolved = {"conv_type": options.conv_type, "conv_streams": options.streams}
    return StreamSettings(
        hidden_size=width,
        num_attention_heads=options.heads,
        conv_window=options.window,
        conv_init=options.init,
        conv_filter=getattr(options, "filter", "taps"),
        conv_state=getattr(options, "filter_state", None) or 0,
        **convolved,
        **more,
    )


def make_convolution(settings: StreamSettings) -> SeparateConvolution | None:
    """Make the filters of the streams that have some, as they start; None without any."""
    if not settings.convolved_streams:
        return None
    convolution = SeparateConvolution(settings, {})
    with torch.no_grad():
        for stream, filters in convolution.filters().items():
            filters.copy_(first_filters(settings, stream))
    return convolution


class Streams(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time."""

    def __init__(self, options: ConvolutionOptions, settings: StreamSettings, bias: bool) -> None:
        super().__init__()
        self.options, self.settings = options, settings
        self.projected = "qkk" if options.shared_kv else STREAMS  # what each stream is made of
        width, different = settings.hidden_size, len(set(self.projected))
        self.projection = nn.Linear(width, different * width, bias=bias)
        self.convolution = make_convolution(settings)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the streams, and a fourth tensor if maps are mixed, see `with_maps`."""
        of = [STREAMS.index(name) for name in self.projected]
        if self.options.place == "before" and self.convolution is not None:
            streams = self._projected_after(x, of, context)
        else:
            made = self.projection(x).unflatten(-1, (-1, x.shape[-1])).unbind(dim=2)
            streams = tuple(made[i] for i in of)
            if self.convolution is not None:
                streams = self.convolution(*streams, context)
            else:
                streams = tuple(s.unflatten(-1, (self.options.heads, -1)) for s in streams)
        if self.options.activation == "silu":
            streams = tuple(map(F.silu, streams))
        mixes = self.settings.mixes_maps
        return self.convolution.with_maps(streams, context) if mixes else streams

    def _projected_after(self, x: Tensor, of: list[int], context: Context) -> tuple[Tensor, ...]:
        """Filter the input, and project what comes out; `of` names each stream's projection."""
        width, bias = x.shape[-1], self.projection.bias
        weights = self.projection.weight.split(width)
        biases = [None] * len(weights) if bias is None else bias.split(width)
        inputs = [
            self.convolution.convolve_one(s, x[:, :, None], None, None, context).squeeze(2)
            for s in STREAMS
        ]
        return tuple(
            F.linear(value, weights[i], biases[i])[:, :, None]
            for value, i in zip(inputs, of, strict=True)
        )


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
            made = self.convolution(query, key, value, context)
        else:
            made = map(self.of_heads, (query, key, value))
        return [F.silu(s) if self.options.activation == "silu" else s for s in made]


def filters_as_lists(convolution: SeparateConvolution) -> dict[str, list[list[float]]]:
    """Return each stream's filters as [N][W], lag 0 first: N heads, or pairs, or channels.

    Of filters as long as the row the first 64 taps.
    """
    found, long_filter = {}, convolution.long_filter
    axis = kinds.get(convolution.conv_type).window_axis
    for stream, filters in convolution.filters().items():
        taps = filters.detach().movedim(axis, -1)
        if long_filter is not None:
            modes = long_filter.modes_of(filters.detach(), convolution.state_size)
            taps = taps_of(modes, _SHOWN)
        found[stream] = taps.reshape(-1, taps.shape[-1]).tolist()
    return found
