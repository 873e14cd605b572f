"""Queries, keys and values of mixers by name, with CAT's filters on chosen streams.

The filters are those of language models, `cat_lm.model.streams`; here projections have
their biases before the convolution, as in Zoology's layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.options import ConvolutionOptions, StreamSettings
from cat_lm.model.context import Context
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.ops.convolution.kinds import STREAMS


def make_convolution(settings: StreamSettings, activates: bool = False) -> StreamPipeline | None:
    """Make the filters of the streams that have some, as they start; None without any."""
    if not settings.convolved_streams:
        return None
    convolution = StreamPipeline(settings, {}, activates)
    with torch.no_grad():
        for name, values in convolution.starts().items():
            convolution.get_parameter(name).copy_(values)
    return convolution


class Streams(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time."""

    def __init__(self, options: ConvolutionOptions, settings: StreamSettings) -> None:
        super().__init__()
        self.heads, self.comes_first = options.heads, options.place == "before"
        self.projected = "qkk" if options.shared_kv else STREAMS  # what each stream is made of
        width, different = settings.hidden_size, len(set(self.projected))
        self.projection = nn.Linear(width, different * width, bias=options.bias)
        activates = options.activation == "silu"
        self.convolution = make_convolution(settings, activates and not self.comes_first)
        # Filters after the projection activate by themselves.
        self.activates = activates and (self.convolution is None or self.comes_first)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the streams; if maps are mixed, also what `StreamPipeline` adds."""
        of = [STREAMS.index(name) for name in self.projected]
        if self.convolution is not None and self.comes_first:
            streams = self._project_each(self.convolution(context, x, x, x), of)
        else:
            made = self.projection(x).unflatten(-1, (-1, x.shape[-1])).unbind(dim=2)
            if self.convolution is None:
                made = [y.unflatten(-1, (self.heads, -1)) for y in made]
                streams = [made[i] for i in of]
            else:
                streams = self.convolution(context, *(made[i] for i in of))
        return tuple(map(F.silu, streams)) if self.activates else tuple(streams)

    def _project_each(self, inputs: tuple[Tensor, ...], of: list[int]) -> list[Tensor]:
        """Project inputs [B, T, 1, C] that are filtered; `of` names each stream's projection."""
        parts = len(set(of))
        weights, bias = self.projection.weight.chunk(parts), self.projection.bias
        biases = [None] * parts if bias is None else bias.chunk(parts)
        return [F.linear(x, weights[i], biases[i]) for x, i in zip(inputs, of, strict=True)]
