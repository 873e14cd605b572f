"""Convolution-augmented attention (CAT, Definition 1), in GPT-NeoX's attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from cat_lm.model.cache import ConvStateMixin
from cat_lm.model.configuration import CatConfig
from cat_lm.model.convolution import ConvolvedProjection


class CatAttention(GPTNeoXAttention):
    """softmax(Q Kᵀ / sqrt(D)) V with Q = (F_q * X) W_q, K = (F_k * X) W_k, V = (F_v * X) W_v.

    The convolution comes before the rotary positions. With `conv_type: none` this is GPT-NeoX's
    attention, bit for bit; with `position_embedding: none` nothing is rotated.
    """

    def __init__(self, config: CatConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.convolved_streams:
            self.query_key_value = ConvolvedProjection(config)
        self.dense.writes_residual = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        layer_past: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends.

        Args:
            hidden_states: [B, T, C].
            attention_mask: as transformers' attention function takes it.
            layer_past: the cache; this layer's part of it is updated.
            position_embeddings: cosines and sines, [B or 1, T, rotated channels]; None for NoPE.
            padding_mask: [B, T] bool, False at padding, for the convolution.
            document_ids: [B, T] for the convolution.

        Returns:
            The output [B, T, C], and the attention maps if the attention function gives them.
        """
        # [B, T, H, D] to [B, H, T, D]
        query, key, value = (
            stream.transpose(1, 2)
            for stream in self._project(hidden_states, padding_mask, document_ids, layer_past)
        )
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, maps = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.dense(output), maps

    def _project(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, ...]:
        if not isinstance(self.query_key_value, ConvolvedProjection):
            projected = self.query_key_value(hidden_states)
            heads = self.config.num_attention_heads
            return projected.view(*projected.shape[:2], heads, 3, -1).unbind(dim=3)
        state = None
        if cache is not None and isinstance(cache.layers[self.layer_idx], ConvStateMixin):
            state = cache.layers[self.layer_idx]
        return self.query_key_value(hidden_states, padding_mask, document_ids, state)
