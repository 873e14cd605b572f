"""Streams and attention of mixers by name: the language models' own, in Zoology's layer.

Projections have their biases before the convolution. What lies between the projections is a pattern
of `cat_lm.model.attention`, over streams that are filtered as in the language models.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from cat_lm.core.parameters import apply_initial_values
from cat_lm.mixers.parts.base import ConvolutionOptions, StreamSettings
from cat_lm.model import attention
from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.masks import check_gaps, context_of
from cat_lm.model.context import Context, layer_context
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.ops.convolution.kinds import STREAMS

ROPE_BASE = 10_000.0


def make_convolution(settings: StreamSettings, activates: bool = False) -> StreamPipeline | None:
    """Build the initialized filters of the convolved streams, or return None if no stream is
    convolved.
    """
    if not settings.convolved_streams:
        return None
    convolution = StreamPipeline(settings, {}, activates)
    with torch.no_grad():
        for name, values in convolution.draw_initial_values().items():
            convolution.get_parameter(name).copy_(values)
    return convolution


class Streams(nn.Module):
    """Queries, keys and values [B, T, H, D] of an input [B, T, C], filtered along time."""

    def __init__(self, options: ConvolutionOptions, settings: StreamSettings) -> None:
        super().__init__()
        self.heads, self.comes_first = options.heads, options.place == "before"
        # The letter of the projection that each stream is read from.
        self.projected = "qkk" if options.shared_kv else STREAMS
        width, different = settings.hidden_size, len(set(self.projected))
        self.projection = nn.Linear(width, different * width, bias=options.bias)
        activates = options.activation == "silu"
        self.convolution = make_convolution(settings, activates and not self.comes_first)
        # Filters after the projection include the activation.
        self.activates = activates and (self.convolution is None or self.comes_first)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return q, k and v; with map mixing also the tensors that `StreamPipeline` adds."""
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
        """Project filtered inputs [B, T, 1, C]; `of` names each stream's projection."""
        parts = len(set(of))
        weights, bias = self.projection.weight.chunk(parts), self.projection.bias
        biases = [None] * parts if bias is None else bias.chunk(parts)
        return [F.linear(x, weights[i], biases[i]) for x, i in zip(inputs, of, strict=True)]


class Attention(AttentionMixin, nn.Module):
    """One attention layer over streams, configured by `options`."""

    eager_attention = staticmethod(eager_attention_forward)
    rotate = staticmethod(apply_rotary_pos_emb)
    is_causal, num_key_value_groups = True, 1

    def __init__(self, options: ConvolutionOptions, settings: StreamSettings) -> None:
        super().__init__()
        self.config, self.attention_dropout = settings, settings.attention_dropout
        self.scaling = settings.head_width**-0.5
        self.streams = Streams(options, settings)
        self.out_proj = nn.Linear(settings.hidden_size, settings.hidden_size, bias=options.bias)
        self._add_parts(settings)
        for part in reversed(list(self.core.modules())):
            apply_initial_values(part)
        pattern = attention.pattern(settings)
        reads_neighbours = pattern.reads_neighbours(settings) and not settings.mixes_maps
        self.refuses_gaps = pattern.masks_keys or reads_neighbours

    @property
    def adds_losses(self) -> bool:
        """Return True if the layer adds its own loss in training."""
        return getattr(self.core, "adds_losses", False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]; `context` may describe documents and padding without positions."""
        if context.positions is None:
            context = self._with_layout(x, context)
        query, key, *others = self.streams(x, context)
        # The convolution's kernel cannot fuse this rotation: it would treat a stack of models one
        # by one.
        if self.config.position_embedding == "rope":
            cos, sin = rotary_angles(context.positions, query)
            query, key = self.rotate(query, key, cos, sin, unsqueeze_dim=2)
        output, _ = self._attend_to_streams((query, key, *others), context)
        return self.out_proj(output.flatten(2))

    def _with_layout(self, x: Tensor, context: Context) -> Context:
        """Return the context with the masks and positions that attention reads."""
        state, padding, documents = context.state, context.padding, context.documents
        cache = None if state is None else Cache(layers=[state])
        if padding is not None and self.refuses_gaps:
            check_gaps(padding, documents)
        real = _real_tokens(x, context)
        found = context_of(self.config, x, real, None, documents, cache)
        kept = {name: getattr(context, name) for name in ("padding", "losses", "conv_backend")}
        return layer_context(replace(found, **kept), 0)


def _real_tokens(x: Tensor, context: Context) -> Tensor | None:
    """Return which keys are real, [B, S] bool including cached keys; None if all are."""
    state, real = context.state, context.padding
    if state is None:
        return real
    before = state.recurrent.get("real")
    if real is None and before is None:
        return None
    if before is None:
        before = x.new_ones(len(x), state.get_seq_length(), dtype=torch.bool)
    if real is None:
        real = before.new_ones(x.shape[:2])
    real = torch.cat([before, real], dim=1)
    state.replace_recurrent("real", real)
    return real


def rotary_angles(positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B or 1, T, D] for heads like x [B, T, H, D], pairs in halves."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
