"""The short filters of CAT on chosen streams, through cat_lm.ops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cat_lm.ops import head_conv

STREAMS = "qkv"
INITS = ("uniform", "identity")


@dataclass(frozen=True)
class ConvolutionOptions:
    """Which streams are convolved, and how.

    Attributes:
        streams: any of q, k, v, such as qkv or k; none for no convolution.
        window: W.
        init: uniform, ±1/√W, torch's own for a convolution, which the authors' code bases leave
            as it is; or identity, which starts as the model without filters.
        place: after the projection, or before it, on the layer's input. With one filter for a
            whole head and no bias the two are the same function.
        heads: H, each with its own filter.
        shared_kv: whether keys and values have one projection, K = V before the filters.
    """

    streams: str | None = STREAMS
    window: int = 3
    init: str = "uniform"
    place: str = "after"
    heads: int = 1
    shared_kv: bool = False

    def __post_init__(self) -> None:
        streams = self.streams or ""
        if len(set(streams)) != len(streams) or not set(streams) <= set(STREAMS):
            raise ValueError(f"streams={self.streams!r}: must be any of q, k, v, or none")
        if self.window < 1 or self.heads < 1:
            raise ValueError("window and heads must be at least 1")
        if self.init not in INITS:
            raise ValueError(f"init={self.init!r}: choose one of {', '.join(INITS)}")
        if self.place not in ("after", "before"):
            raise ValueError(f"place={self.place!r}: must be after or before")
        if self.place == "before" and self.heads > 1:
            raise ValueError("place=before needs heads=1: before the projection there are no heads")


class ConvolvedProjections(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time.

    The filters' parameters are `filters.q`, `filters.k`, `filters.v` [H, W], lag 0 first.
    """

    def __init__(self, d_model: int, options: ConvolutionOptions, bias: bool) -> None:
        super().__init__()
        if d_model % options.heads:
            raise ValueError(f"heads={options.heads} do not divide d_model={d_model}")
        self.options = options
        self.projected = "qkk" if options.shared_kv else STREAMS  # what each stream is made of
        different = len(set(self.projected))
        self.projection = nn.Linear(d_model, different * d_model, bias=bias)
        self.filters = nn.ParameterDict(
            {s: nn.Parameter(self._initial()) for s in STREAMS if s in (options.streams or "")}
        )

    def _initial(self) -> Tensor:
        shape = (self.options.heads, self.options.window)
        if self.options.init == "identity":
            return torch.eye(1, self.options.window).repeat(self.options.heads, 1)
        return torch.empty(shape).uniform_(-1, 1) / math.sqrt(self.options.window)

    def forward(self, x: Tensor) -> list[Tensor]:
        of = [STREAMS.index(name) for name in self.projected]
        if self.options.place == "before":
            width = x.shape[-1]
            weights = self.projection.weight.split(width)
            bias = self.projection.bias
            biases = [None] * len(weights) if bias is None else bias.split(width)
            inputs = [self._filtered(s, x[:, :, None]).squeeze(2) for s in STREAMS]
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
        return [self._filtered(s, streams[i]) for s, i in zip(STREAMS, of, strict=True)]

    def _filtered(self, stream: str, x: Tensor) -> Tensor:
        return head_conv(x, self.filters[stream]) if stream in self.filters else x
