"""Attention of mixers by name: the language models' own, between Zoology's projections.

What lies between the projections is a pattern of `cat_lm.model.attention`, over streams that are
filtered as in the language models.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from cat_lm.core.parameters import start
from cat_lm.mixers.parts.options import ConvolutionOptions, StreamSettings
from cat_lm.mixers.parts.streams import Streams
from cat_lm.model import attention
from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.masks import check_gaps, context_of
from cat_lm.model.context import Context, layer_context

ROPE_BASE = 10_000.0


class Attention(AttentionMixin, nn.Module):
    """One layer of attention over streams as `options` say, with the settings that follow."""

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
            start(part)
        pattern = attention.pattern(settings)
        reads_neighbours = pattern.reads_neighbours(settings) and not settings.mixes_maps
        self.refuses_gaps = pattern.masks_keys or reads_neighbours

    @property
    def adds_losses(self) -> bool:
        """Return True if training has a loss of the layer's own."""
        return getattr(self.core, "adds_losses", False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]; a context without positions is one of documents and padding alone."""
        if context.positions is None:
            context = self._with_layout(x, context)
        query, key, *others = self.streams(x, context)
        # Not in the convolution's kernel, which would rotate a stack of models one by one.
        if self.config.position_embedding == "rope":
            cos, sin = rotary_angles(context.positions, query)
            query, key = self.rotate(query, key, cos, sin, unsqueeze_dim=2)
        output, _ = self._meet((query, key, *others), context)
        return self.out_proj(output.flatten(2))

    def _with_layout(self, x: Tensor, context: Context) -> Context:
        """Return the context with what attention reads, as a model's body makes it."""
        state, padding, documents = context.state, context.padding, context.documents
        cache = None if state is None else Cache(layers=[state])
        if padding is not None and self.refuses_gaps:
            check_gaps(padding, documents)
        real = _real_tokens(x, context)
        found = context_of(self.config, x, real, None, documents, cache)
        kept = {name: getattr(context, name) for name in ("padding", "losses", "conv_backend")}
        return layer_context(replace(found, **kept), 0)


def _real_tokens(x: Tensor, context: Context) -> Tensor | None:
    """Return which keys are real, [B, S] bool with those of the state; None where all are."""
    state, real = context.state, context.padding
    if state is None:
        return real
    before = state.recurrent.get("real")
    if real is None and before is None:
        return None
    past = state.get_seq_length()
    if before is None:
        before = x.new_ones(len(x), past, dtype=torch.bool)
    if real is None:
        real = before.new_ones(x.shape[:2])
    real = torch.cat([before, real], dim=1)
    state.replace_recurrent("real", real)
    return real


def rotary_angles(positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [B or 1, T, D] for heads like x [B, T, H, D], halves together."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
