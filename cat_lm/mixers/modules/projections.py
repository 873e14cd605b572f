"""Project to queries, keys and values, with the short filters of CAT on chosen streams."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.parameters import NothingDecays
from cat_lm.mixers.modules.context import (
    State,
    inputs_before,
    long_convolution,
    short_convolution,
    without_padding,
)
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.maps import mixed_values
from cat_lm.ops.convolution.reference import check_kind
from cat_lm.ops.long_filter.chunks import taps_of
from cat_lm.ops.long_filter.filters import LongFilter, Modes

if TYPE_CHECKING:
    from cat_lm.mixers.shared import ConvolutionOptions, DeltaOptions

_SHOWN = 64  # taps of a filter without an end


def initial_filters(
    options: ConvolutionOptions | DeltaOptions, heads: int, head_dim: int
) -> Tensor:
    """Make one stream's filters as they start, of the shape that their kind says.

    Raises:
        ValueError: the kind is none that there can be.
    """
    kind, window = kinds.get(options.conv_type), options.window
    check_kind(kind)
    if (long_filter := getattr(options, "long_filter", None)) is not None:
        return long_filter.start_as(options.init, heads, options.filter_state)
    if options.init == "identity":
        return kind.identity(heads, head_dim, window)
    filters = torch.empty(kind.filter_shape(heads, head_dim, window))
    return filters.uniform_(-1, 1) / math.sqrt(kind.fan_in(heads, window))


class Filters(NothingDecays, nn.ParameterDict):
    """Filters by stream; none of them takes weight decay.

    Attributes:
        conv_type: their kind's name.
        long_filter, state: the kind of those as long as the row, and their N; None for taps.
    """

    def __init__(
        self,
        conv_type: str,
        filters: dict[str, nn.Parameter],
        long_filter: LongFilter | None = None,
        state: int | None = None,
    ) -> None:
        super().__init__(filters)
        self.conv_type, self.long_filter, self.state = conv_type, long_filter, state

    def modes(self, stream: str) -> Modes:
        """Compute a stream's filters as long as the row."""
        return self.long_filter.modes_of(self[stream], self.state)

    @property
    def of_channels(self) -> bool:
        """Return True if each channel has its own."""
        return "D" in kinds.get(self.conv_type).filter_axes

    def lists(self) -> dict[str, list[list[float]]]:
        """Return each stream's filters as [N][W], lag 0 first: N heads, or pairs, or channels.

        Of filters as long as the row the first 64 taps.
        """
        if self.long_filter is not None:
            with torch.no_grad():
                return {stream: taps_of(self.modes(stream), _SHOWN).tolist() for stream in self}
        axis = kinds.get(self.conv_type).window_axis
        last = {stream: f.detach().movedim(axis, -1) for stream, f in self.items()}
        return {stream: f.reshape(-1, f.shape[-1]).tolist() for stream, f in last.items()}


def activate(options: ConvolutionOptions | DeltaOptions, x: Tensor) -> Tensor:
    """Apply the activation that follows the filters."""
    return F.silu(x) if options.activation == "silu" else x


class ConvolvedProjections(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time.

    The filters' parameters are `filters.q`, `filters.k`, `filters.v`, lag 0 first, of the shape
    that their kind says: [H, W] for one filter a head.

    Args:
        mixes_maps: leave the values as they are; their filters are for `mixed`.
    """

    def __init__(
        self, d_model: int, options: ConvolutionOptions, bias: bool, mixes_maps: bool = False
    ) -> None:
        super().__init__()
        self.options = options
        self.projected = "qkk" if options.shared_kv else STREAMS  # what each stream is made of
        different = len(set(self.projected))
        self.projection = nn.Linear(d_model, different * d_model, bias=bias)
        sizes = (options.heads, d_model // options.heads)
        convolved = [stream for stream in STREAMS if stream in (options.streams or "")]
        self.filters = Filters(
            options.conv_type,
            {stream: nn.Parameter(initial_filters(options, *sizes)) for stream in convolved},
            options.long_filter,
            options.filter_state,
        )
        self.filtered = set(convolved) - ({"v"} if mixes_maps else set())

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> list[Tensor]:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        of = [STREAMS.index(name) for name in self.projected]
        if self.options.place == "before":
            streams = self._projected_after(x, of, **how)
        else:
            heads = (-1, self.options.heads, x.shape[-1] // self.options.heads)
            made = self.projection(x).unflatten(-1, heads).unbind(dim=2)
            streams = [self._filtered(s, made[i], **how) for s, i in zip(STREAMS, of, strict=True)]
        return [activate(self.options, stream) for stream in streams]

    def mixed(
        self,
        value: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        """Make `mixed_values` [B, T, H, H D] of values [B, T, H, D], for the mixing of maps."""
        value, filters = without_padding(value, padding_mask), self.filters["v"]
        before = inputs_before(value, self.options.window - 1, "v_inputs", padding_mask, state)
        if before is None:
            return mixed_values(value, filters, document_ids)
        return mixed_values(torch.cat([before, value], dim=1), filters)[:, before.shape[1] :]

    def _projected_after(
        self, x: Tensor, of: list[int], **how: Tensor | State | None
    ) -> list[Tensor]:
        """Filter the input, and project what comes out; `of` names each stream's projection."""
        width, bias = x.shape[-1], self.projection.bias
        weights = self.projection.weight.split(width)
        biases = [None] * len(weights) if bias is None else bias.split(width)
        inputs = [self._filtered(s, x[:, :, None], **how).squeeze(2) for s in STREAMS]
        return [
            F.linear(value, weights[i], biases[i])[:, :, None]
            for value, i in zip(inputs, of, strict=True)
        ]

    def _filtered(self, stream: str, x: Tensor, **how: Tensor | State | None) -> Tensor:
        if stream not in self.filtered:
            return x
        if self.filters.long_filter is not None:
            return long_convolution(x, self.filters.modes(stream), f"{stream}_filter", **how)
        return short_convolution(
            *(x, self.filters[stream]),
            name=f"{stream}_inputs",
            conv_type=self.options.conv_type,
            **how,
        )
