"""Llama's block with convolution-augmented attention, on transformers' own modules."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.context import Context
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.model.streams.short_convolution import CanonBlock
from cat_lm.ops.convolution.kinds import STREAMS


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
    rotate = staticmethod(apply_rotary_pos_emb)
    output_name = "o_proj"

    def __init__(self, config: AttentionSettings, layer_idx: int):
        super().__init__(config, layer_idx)
        self.convolution = None
        if config.convolved_streams:
            # In the order of the computation, which is that of the optimizer's flat buffers.
            output = self._modules.pop("o_proj")
            projections = {stream: getattr(self, f"{stream}_proj") for stream in STREAMS}
            biases = {f"{stream}_bias": layer.bias for stream, layer in projections.items()}
            self.convolution = StreamPipeline(config, biases)
            for projection in projections.values():
                projection.register_parameter("bias", None)
            self.o_proj = output
            self._take_library_names()
        self.o_proj.writes_residual = True
        self._add_parts(config)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"{stream}_proj")(x) for stream in STREAMS)

    def _streams(
        self, query: Tensor, key: Tensor, value: Tensor, context: Context
    ) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, and values, [B, T, its heads, D].

        Args:
            query, key, value: [B, T, heads · D].
        """
        if self.convolution is not None:
            return self.convolution(context, query, key, value, norm=self.qk_norm)
        streams = (x.unflatten(2, (-1, self.head_dim)) for x in (query, key, value))
        return self._unconvolved(*streams, context)


class CatLlamaLayer(CanonBlock, LlamaDecoderLayer):
    """Llama's layer with `CatLlamaAttention`, and Canon layers where the configuration says."""

    def __init__(self, config: AttentionSettings, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = CatLlamaAttention(config, layer_idx)
        self.mlp.down_proj.writes_residual = True
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, CatLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self._add_canon(config, 2 * config.intermediate_size)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Compute the layer, [B, T, C]."""
        read = self._with_canon("A", self.input_layernorm(hidden_states), context)
        stream = hidden_states + self.self_attn(read, context)[0]
        read = self._with_canon("C", self.post_attention_layernorm(stream), context)
        return stream + self._feed_forward(read, context)

    def _feed_forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Compute the MLP, whose gate and values pass the Canon layer side by side."""
        mlp = self.mlp
        if self.canon is None or "D" not in self.canon:
            return mlp(hidden_states)
        both = torch.cat([mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)], dim=-1)
        gate, values = self._with_canon("D", both, context).chunk(2, dim=-1)
        return mlp.down_proj(mlp.act_fn(gate) * values)
