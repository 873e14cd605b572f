"""Convolution-augmented attention (CAT, Definition 1), in GPT-NeoX's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from cat_lm.model.cache import follows_cache, state_of
from cat_lm.model.configuration import CatConfig
from cat_lm.model.convolution import PackedConvolution
from cat_lm.model.map_mixing import attend_mixing_maps, sum_over_maps
from cat_lm.model.names import current_name
from cat_lm.model.rope_scaling import logit_temperature


class AttentionMixin:
    """Calls the configuration's attention function for the attention of any family."""

    eager_attention: Callable  # the family's own, of transformers

    def take_earlier_names(self) -> None:
        """Read the library's and earlier versions' names of what the convolution holds now."""
        self.register_load_state_dict_pre_hook(_rename_earlier_parameters)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The configuration's attention function: [B, T, H, values' width], and maybe the maps."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, type(self).eager_attention
        )
        return attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **kwargs,
        )


class CatAttention(AttentionMixin, GPTNeoXAttention):
    """softmax(Q Kᵀ / sqrt(D)) V with Q = (F_q * X) W_q, K = (F_k * X) W_k, V = (F_v * X) W_v.

    The convolution comes before the rotary positions. With `conv_mixing: maps` the values' filters
    act on the softmax instead: see `cat_lm.model.map_mixing`. With `conv_type: none` this is
    GPT-NeoX's attention, bit for bit; with `position_embedding: none` nothing is rotated.
    """

    eager_attention = staticmethod(eager_attention_forward)

    def __init__(self, config: CatConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.convolution = None
        if config.convolved_streams:
            # Drawn once more, although it will be initialised, and drawn with its bias: so a seed
            # gives the weights that it always gave.
            width = config.hidden_size
            self.query_key_value = nn.Linear(width, 3 * width, bias=config.attention_bias)
            # In the order of the computation, which is that of the optimizer's flat buffers.
            dense = self._modules.pop("dense")
            self.convolution = PackedConvolution(config, self.query_key_value.bias)
            self.query_key_value.register_parameter("bias", None)
            self.dense = dense
            self.take_earlier_names()
        self.dense.writes_residual = True
        self.scaling /= logit_temperature(config)

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
        continues = follows_cache(layer_past, self.layer_idx)
        streams = self._project(
            hidden_states,
            position_embeddings,
            padding_mask,
            document_ids,
            layer_past,
            continues,
        )
        # [B, T, H, D] to [B, H, T, D]
        query, key, value = (stream.transpose(1, 2) for stream in streams[:3])
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)

        if not self.config.mixes_maps:
            output, maps = self._attend(query, key, value, attention_mask, **kwargs)
        elif continues:
            dropout = self.attention_dropout if self.training else 0.0
            output, maps = attend_mixing_maps(
                query, key, value, streams[3], attention_mask, self.scaling, dropout
            )
        else:
            mixed = streams[3].transpose(1, 2)
            output, maps = self._attend(query, key, mixed, attention_mask, **kwargs)
            output = sum_over_maps(output)
        return self.dense(output.flatten(2).contiguous()), maps

    def _project(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        cache: Cache | None,
        continues: bool,
    ) -> tuple[Tensor, ...]:
        """Rotated queries and keys, and values, each [B, T, H, D]; see `PackedConvolution`."""
        projected = self.query_key_value(hidden_states)
        if self.convolution is None:
            heads = self.config.num_attention_heads
            projected = projected.view(*projected.shape[:2], heads, 3, -1).transpose(1, 2)
            query, key, value = projected.unbind(dim=3)
            if rotary is not None:
                query, key = apply_rotary_pos_emb(query, key, *rotary)
            return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        state = state_of(cache, self.layer_idx)
        return self.convolution(projected, rotary, padding_mask, document_ids, state, continues)


def _rename_earlier_parameters(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Take GPT-NeoX's and earlier versions' names for what the convolution holds now."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[current_name(name, has_convolution=True)] = state_dict.pop(name)
