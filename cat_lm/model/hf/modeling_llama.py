"""`CatLlamaForCausalLM`: Llama with convolution-augmented attention, on transformers' classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from cat_lm.model.attention.core import AttentionMixin, SequenceContext
from cat_lm.model.cache import state_of
from cat_lm.model.canon import CanonBlock, Reading
from cat_lm.model.convolution import SeparateConvolution
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel, PreTrainedMixin
from cat_lm.model.hf.configuration_llama import CatLlamaConfig
from cat_lm.model.hf.masks import check_attention
from cat_lm.model.rope import CatLlamaRotaryEmbedding
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class CatLlamaRMSNorm(LlamaRMSNorm):
    """Llama's norm, which says that its weight takes no decay."""

    no_decay = ("weight",)


class CatLlamaAttention(AttentionMixin, LlamaAttention):
    """softmax(Q Kᵀ / sqrt(D)) V with Q = (F_q * X) W_q, K = (F_k * X) W_k, V = (F_v * X) W_v.

    The convolution comes before the rotary positions. `q_proj`, `k_proj` and `v_proj` are plain
    linear layers; filters, and biases if the model has them, are `convolution`'s. With
    `conv_type: none` this is Llama's attention, bit for bit; with `position_embedding: none`
    nothing is rotated.
    """

    eager_attention = staticmethod(eager_attention_forward)

    def __init__(self, config: CatLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.convolution = None
        if config.convolved_streams:
            # In the order of the computation, which is that of the optimizer's flat buffers.
            output = self._modules.pop("o_proj")
            projections = {stream: getattr(self, f"{stream}_proj") for stream in STREAMS}
            biases = {stream: projection.bias for stream, projection in projections.items()}
            self.convolution = SeparateConvolution(config, biases)
            for projection in projections.values():
                projection.register_parameter("bias", None)
            self.o_proj = output
            self._take_library_names()
        self.o_proj.writes_residual = True
        self._add_parts(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_positions: Tensor | None = None,
        document_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [B, T, C].
            position_embeddings: cosines and sines, [B or 1, T, D]; None for NoPE.
            attention_mask: as transformers' attention function takes it.
            past_key_values: the cache; this layer's part of it is updated.
            padding_mask: [B, T] bool, False at padding, for the convolution.
            document_ids: [B, T] for the convolution.
            key_positions: [B, S] of all keys, where something reads positions; see
                `cat_lm.model.hf.masks`.
            document_positions: [B, T] int32, what `document_ids` say to the convolution, if known.

        Returns:
            The output [B, T, C], and the attention maps if the attention function gives them.
        """
        projected = tuple(getattr(self, f"{stream}_proj")(hidden_states) for stream in STREAMS)
        reading = position_embeddings, padding_mask, document_ids, document_positions
        streams = self._divided(partial(self._streams, past_key_values), projected, *reading)
        output, maps = self._meet(
            streams,
            SequenceContext(
                attention_mask, past_key_values, padding_mask, document_ids, key_positions, kwargs
            ),
        )
        return self.o_proj(output.flatten(2).contiguous()), maps

    def _streams(
        self,
        cache: Cache | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        document_positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Rotated queries and keys, and values, [B, T, its heads, D], of [B, T, heads · D]."""
        if self.convolution is None:
            # [B, T, H, D] to [B, H, T, D]
            streams = self._normalized(
                *(x.unflatten(2, (-1, self.head_dim)) for x in (query, key, value))
            )
            query, key, value = (stream.transpose(1, 2) for stream in streams)
            if rotary is not None:
                query, key = apply_rotary_pos_emb(query, key, *rotary)
            return tuple(stream.transpose(1, 2) for stream in (query, key, value))
        return self.convolution(
            query,
            key,
            value,
            rotary,
            padding_mask,
            document_ids,
            state_of(cache, self.layer_idx),
            document_positions,
            norm=self.qk_norm,
        )


class CatLlamaLayer(CanonBlock, LlamaDecoderLayer):
    """Llama's layer with `CatLlamaAttention`, and Canon layers where the configuration says."""

    def __init__(self, config: CatLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = CatLlamaAttention(config, layer_idx)
        self.mlp.down_proj.writes_residual = True
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, CatLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self._add_canon(config, 2 * config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, past_key_values: Cache | None = None, **arguments: Any
    ) -> Tensor:
        """Compute the layer, [B, T, C]; arguments as of `CatLlamaAttention`."""
        if self.canon is None:
            return super().forward(hidden_states, past_key_values=past_key_values, **arguments)
        reading = Reading(
            arguments.get("padding_mask"),
            arguments.get("document_ids"),
            arguments.get("document_positions"),
            state_of(past_key_values, self.self_attn.layer_idx),
        )
        read = self._with_canon("A", self.input_layernorm(hidden_states), reading)
        attended, _ = self.self_attn(read, past_key_values=past_key_values, **arguments)
        stream = hidden_states + attended
        read = self._with_canon("C", self.post_attention_layernorm(stream), reading)
        return stream + self._feed_forward(read, reading)

    def _feed_forward(self, hidden_states: Tensor, reading: Reading) -> Tensor:
        """Compute the MLP, whose gate and values pass the Canon layer side by side."""
        mlp = self.mlp
        if "D" not in self.canon:
            return mlp(hidden_states)
        both = torch.cat([mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)], dim=-1)
        gate, values = self._with_canon("D", both, reading).chunk(2, dim=-1)
        return mlp.down_proj(mlp.act_fn(gate) * values)


class CatLlamaPreTrainedModel(PreTrainedMixin, LlamaPreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatLlamaConfig
    config: CatLlamaConfig
    _no_split_modules = ("CatLlamaLayer",)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": CatLlamaLayer,
        "attentions": CatLlamaAttention,
    }


class CatLlamaModel(CausalBody, CatLlamaPreTrainedModel, LlamaModel):
    """The transformer without its head. Module names are Llama's."""

    def __init__(self, config: CatLlamaConfig):
        # LlamaModel's own constructor would build every layer once more.
        super(LlamaModel, self).__init__(config)
        check_attention(config)
        # Without a padding index, whose row would get no gradient: padding is often the token that
        # ends documents.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            CatLlamaLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = CatLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.position_embedding == "rope":
            self.rotary_emb = CatLlamaRotaryEmbedding(config)
        else:
            self.rotary_emb = None
        self.gradient_checkpointing = False
        self.post_init()

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)


class CatLlamaForCausalLM(CausalLanguageModel, CatLlamaPreTrainedModel, LlamaForCausalLM):
    """The language model. `state_dict()` has Llama's names, and the filters beside them."""

    def __init__(self, config: CatLlamaConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = CatLlamaModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
