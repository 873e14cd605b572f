"""`CatForCausalLM`: GPT-NeoX with convolution-augmented attention, on transformers' own classes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXForCausalLM,
    GPTNeoXLayer,
    GPTNeoXModel,
    GPTNeoXPreTrainedModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from cat_lm.model.attention.core import AttentionMixin, SequenceContext
from cat_lm.model.cache import state_of
from cat_lm.model.canon import CanonBlock, Reading
from cat_lm.model.convolution import PackedConvolution
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel, PreTrainedMixin
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.model.hf.masks import check_attention
from cat_lm.model.rope import CatRotaryEmbedding
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class CatAttention(AttentionMixin, GPTNeoXAttention):
    """softmax(Q Kᵀ / sqrt(D)) V with Q = (F_q * X) W_q, K = (F_k * X) W_k, V = (F_v * X) W_v.

    The convolution comes before the rotary positions. With `conv_mixing: maps` the values' filters
    act on the softmax instead: see `MapMixingCore`. With `conv_type: none` this is GPT-NeoX's
    attention, bit for bit; with `position_embedding: none` nothing is rotated.
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
            self._take_library_names()
        self.dense.writes_residual = True
        self._add_parts(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        layer_past: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_positions: Tensor | None = None,
        document_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [B, T, C].
            attention_mask: as transformers' attention function takes it.
            layer_past: the cache; this layer's part of it is updated.
            position_embeddings: cosines and sines, [B or 1, T, rotated channels]; None for NoPE.
            padding_mask: [B, T] bool, False at padding, for the convolution.
            document_ids: [B, T] for the convolution.
            key_positions: [B, S] of all keys, where something reads positions; see
                `cat_lm.model.hf.masks`.
            document_positions: [B, T] int32, what `document_ids` say to the convolution, if known.

        Returns:
            The output [B, T, C], and the attention maps if the attention function gives them.
        """
        streams = self._project(
            hidden_states,
            position_embeddings,
            padding_mask,
            document_ids,
            document_positions,
            layer_past,
        )
        output, maps = self._meet(
            streams,
            SequenceContext(
                attention_mask, layer_past, padding_mask, document_ids, key_positions, kwargs
            ),
        )
        return self.dense(output.flatten(2).contiguous()), maps

    def _project(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        document_positions: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, ...]:
        """Rotated queries and keys, and values, each [B, T, H, D]; see `PackedConvolution`."""
        projected = (self.query_key_value(hidden_states),)
        reading = rotary, padding_mask, document_ids, document_positions
        return self._divided(partial(self._streams, cache), projected, *reading)

    def _streams(
        self,
        cache: Cache | None,
        projected: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        document_positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return what `_project` does, of what is projected, [B, T, H·3·D]."""
        if self.convolution is None:
            width = self.config.head_width
            # Before heads and time change places: the backward pass joins the three as they lie.
            streams = projected.view(*projected.shape[:2], -1, 3, width).unbind(dim=3)
            streams = self._normalized(*streams)
            if rotary is None:
                return streams
            query, key, value = (stream.transpose(1, 2) for stream in streams)
            query, key = apply_rotary_pos_emb(query, key, *rotary)
            return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return self.convolution(
            projected,
            rotary,
            padding_mask,
            document_ids,
            state_of(cache, self.layer_idx),
            self._continues(cache),
            document_positions,
            norm=self.qk_norm,
        )


class CatLayer(CanonBlock, GPTNeoXLayer):
    """GPT-NeoX's layer with `CatAttention`, and Canon layers where the configuration says."""

    def __init__(self, config: CatConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention = CatAttention(config, layer_idx)
        self.mlp.dense_4h_to_h.writes_residual = True
        self._add_canon(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, layer_past: Cache | None = None, **arguments: Any
    ) -> Tensor:
        """Compute the layer, [B, T, C]; arguments as of `CatAttention`."""
        if self.canon is None:
            return super().forward(hidden_states, layer_past=layer_past, **arguments)
        reading = Reading(
            arguments.get("padding_mask"),
            arguments.get("document_ids"),
            arguments.get("document_positions"),
            state_of(layer_past, self.attention.layer_idx),
        )
        read = self._with_canon("A", self.input_layernorm(hidden_states), reading)
        attended, _ = self.attention(read, layer_past=layer_past, **arguments)
        stream = self.post_attention_dropout(attended) + hidden_states
        base = hidden_states if self.use_parallel_residual else stream
        read = self._with_canon("C", self.post_attention_layernorm(base), reading)
        inner = self._with_canon("D", self.mlp.dense_h_to_4h(read), reading)
        return stream + self.post_mlp_dropout(self.mlp.dense_4h_to_h(self.mlp.act(inner)))


class CatPreTrainedModel(PreTrainedMixin, GPTNeoXPreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatConfig
    config: CatConfig
    _no_split_modules = ("CatLayer",)
    _can_record_outputs = {"hidden_states": CatLayer, "attentions": CatAttention}  # noqa: RUF012


class CatModel(CausalBody, CatPreTrainedModel, GPTNeoXModel):
    """The transformer without its head. Module names are GPT-NeoX's."""

    cache_argument = "layer_past"

    def __init__(self, config: CatConfig):
        # GPTNeoXModel's own constructor would build every layer once more.
        super(GPTNeoXModel, self).__init__(config)
        check_attention(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            CatLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.position_embedding == "rope":
            self.rotary_emb = CatRotaryEmbedding(config)
        else:
            self.rotary_emb = None
        self.gradient_checkpointing = False
        self.post_init()

    def _enter(self, inputs_embeds: Tensor) -> Tensor:
        return self.emb_dropout(inputs_embeds)

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.final_layer_norm(hidden_states)


class CatForCausalLM(CausalLanguageModel, CatPreTrainedModel, GPTNeoXForCausalLM):
    """The language model. `state_dict()` has GPT-NeoX's names, and the filters beside them."""

    def __init__(self, config: CatConfig):
        super(GPTNeoXForCausalLM, self).__init__(config)
        self.gpt_neox = CatModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
