"""Project to queries, keys and values, with the short filters of CAT on chosen streams."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cat_lm.mixers.modules.context import State, short_convolution
from cat_lm.mixers.shared import STREAMS, ConvolutionOptions


class Filters(nn.ParameterDict):
    """Filters by stream; none of them takes weight decay."""

    no_decay = tuple(STREAMS)


class ConvolvedProjections(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time.

    The filters' parameters are `filters.q`, `filters.k`, `filters.v` [H, W], lag 0 first.
    """

    def __init__(self, d_model: int, options: ConvolutionOptions, bias: bool) -> None:
        super().__init__()
        self.options = options
        self.projected = "qkk" if options.shared_kv else STREAMS  # what each stream is made of
        different = len(set(self.projected))
        self.projection = nn.Linear(d_model, different * d_model, bias=bias)
        self.filters = Filters(
            {s: nn.Parameter(self._initial()) for s in STREAMS if s in (options.streams or "")}
        )

    def _initial(self) -> Tensor:
        shape = (self.options.heads, self.options.window)
        if self.options.init == "identity":
            return torch.eye(1, self.options.window).repeat(self.options.heads, 1)
        return torch.empty(shape).uniform_(-1, 1) / math.sqrt(self.options.window)

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
            width = x.shape[-1]
            weights = self.projection.weight.split(width)
            bias = self.projection.bias
            biases = [None] * len(weights) if bias is None else bias.split(width)
            inputs = [self._filtered(s, x[:, :, None], **how).squeeze(2) for s in STREAMS]
            found = (
                nn.functional.linear(value, weights[i], biases[i])
                for value, i in zip(inputs, of, strict=True)
            )
            return [stream[:, :, None] for stream in found]
        streams = (
            self.projection(x)
            .unflatten(-1, (-1, self.options.heads, x.shape[-1] // self.options.heads))
            .unbind(dim=2)
        )
        return [self._filtered(s, streams[i], **how) for s, i in zip(STREAMS, of, strict=True)]

    def _filtered(self, stream: str, x: Tensor, **how: Tensor | State | None) -> Tensor:
        if stream not in self.filters:
            return x
        return short_convolution(x, self.filters[stream], name=f"{stream}_inputs", **how)
