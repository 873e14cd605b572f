"""A convolution of a stream by filters of W taps (CAT, Definition 1 and section 3.1)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cat_lm.model.streams.base import StreamCall, StreamOp
from cat_lm.ops import convolve
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.reference import check_kind

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class Convolution(StreamOp):
    """Convolves a stream along time, and adds its projection's bias.

    For head h and lags j = 0 … W−1 (zeros before the start), with one filter for each head
    (`conv_type: head`):

        y[b,t,h,:] = bias_h + sum_j F[h,j] x[b,t−j,h,:],   x = hidden · Wᵀ_h

    which is (F * X) W + b of the paper's definition: a filter that the channels of a head share
    commutes with the projection, and the bias is added after the convolution. The other kinds are
    in `cat_lm.ops.convolution.kinds`. With `conv_norm: l1` a filter is divided by its magnitudes'
    sum, `Kind.normalized`.
    """

    name = "filter"

    def __init__(self, config: AttentionSettings) -> None:
        self.kind = kinds.get(config.conv_type)
        self.settings, self.window = config, config.conv_window
        axes = self.kind.filter_axes
        self.head_axis = axes.index("H") if "H" in axes and not self.kind.mixes_heads else None
        self.normalizes = config.conv_norm == "l1"

    def initial(self, stream: str) -> Tensor:
        """Make filters that change nothing. Raises ValueError for a kind that cannot be."""
        check_kind(self.kind)
        config = self.settings
        shape = config.stream_heads(stream), config.stream_width(stream), self.window
        return self.kind.identity(*shape)

    def drawn(self, stream: str) -> Tensor:
        """Draw filters as they start, by `conv_init`."""
        start, way = self.initial(stream), self.settings.conv_init
        if way == "identity":
            return start
        bound = 1 / math.sqrt(self.kind.fan_in(self.settings.stream_heads(stream), self.window))
        drawn = torch.empty_like(start).uniform_(-bound, bound)
        return drawn if way == "uniform" else start + drawn

    def used(self, filters: Tensor) -> Tensor:
        """Return filters as they are used."""
        return self.kind.normalized(filters) if self.normalizes else filters

    def __call__(
        self, x: Tensor, call: StreamCall, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Convolve x, and rotate what comes out where `rotary` has the angles."""
        filters = call.weights.taps(call.stream, call.context.group)
        return self.by(filters, call, call.bias, rotary)

    def by(
        self,
        filters: Tensor,
        call: StreamCall,
        bias: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Convolve a call's inputs by filters."""
        context = call.context
        return convolve(
            self.kind.name,
            call.inputs,
            filters,
            bias,
            rotary=rotary,
            document_ids=context.documents,
            positions=context.document_positions,
            initial_state=call.before,
            backend=context.conv_backend,
        )


class Bias(StreamOp):
    """Adds its projection's bias to a stream without filters."""

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        return x if call.bias is None else x + call.bias.to(x.dtype)
