"""GPT-NeoX's and Llama's blocks with convolution-augmented attention, on transformers' modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXLayer
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from cat_lm.model.attention.core import AttentionMixin, rename_library_parameters
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.blocks.mlp import CatMLP
from cat_lm.model.context import Context
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.model.streams.short_convolution import CanonBlock
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.residual.parallel import add_branches, two_norms


class ConvolvedAttention(AttentionMixin):
    """transformers' attention, with a `StreamPipeline` for q, k and v if it has filters."""

    def _add_convolution(self, config: AttentionSettings, biased: dict[str, nn.Linear]) -> None:
        """Add filters, which take over the biases of the projections, and the parts of attention.

        Args:
            biased: the projections, by the names of their biases in the pipeline.
        """
        self.convolution = None
        output = self._modules[self.output_name]
        if config.convolved_streams:
            # Keep the modules in the order of the computation, which the optimizer's flat buffers
            # follow.
            del self._modules[self.output_name]
            biases = {name: projection.bias for name, projection in biased.items()}
            self.convolution = StreamPipeline(config, biases)
            for projection in biased.values():
                projection.register_parameter("bias", None)
            self.add_module(self.output_name, output)
            self.register_load_state_dict_pre_hook(rename_library_parameters)
        output.writes_residual = True
        self._add_parts(config)

    def _streams(self, *projected: Tensor | Context) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, and values, each [B, T, heads, D].

        Args:
            projected: [B, T, channels] each; the context comes last.
        """
        *projected, context = projected
        if self.convolution is not None:
            return self.convolution(context, *projected, norm=self.qk_norm)
        return self._rotate_unconvolved(*self._split(*projected), context)


class CatAttention(ConvolvedAttention, GPTNeoXAttention):
    """softmax(Q Kᵀ / sqrt(D)) V with Q = (F_q * X) W_q, K = (F_k * X) W_k, V = (F_v * X) W_v.

    The convolution comes before the rotary positions. With `conv_mixing: maps` the values' filters
    act on the softmax instead: see `MapMixingCore`. With `conv_type: none` this is GPT-NeoX's
    attention, bit for bit; with `position_embedding: none` nothing is rotated.
    """

    eager_attention = staticmethod(modeling_gpt_neox.eager_attention_forward)
    rotate = staticmethod(modeling_gpt_neox.apply_rotary_pos_emb)
    output_name = "dense"

    def __init__(self, config: AttentionSettings, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.convolved_streams:
            # Draw it again, with its bias, although it will be initialized: existing seeds then
            # keep their weights.
            width = config.hidden_size
            self.query_key_value = nn.Linear(width, 3 * width, bias=config.attention_bias)
        # Rows are [H, 3, D]: an optimizer of whole matrices takes queries, keys and values apart.
        self.query_key_value.packed_rows = (config.num_attention_heads, 3)
        self._add_convolution(config, {"bias": self.query_key_value})

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.query_key_value(x),)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        # Keep this memory order until heads and time are exchanged: the backward pass joins q, k
        # and v in it.
        return projected.view(*projected.shape[:2], -1, 3, self.config.head_width).unbind(dim=3)


class CatLayer(CanonBlock, GPTNeoXLayer):
    """GPT-NeoX's layer with `CatAttention`, and Canon layers if configured."""

    def __init__(self, config: AttentionSettings, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention = CatAttention(config, layer_idx)
        self.mlp.__class__ = CatMLP
        self.mlp.dense_4h_to_h.writes_residual = True
        self._add_canon(config, config.intermediate_size)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        if not self.use_parallel_residual:
            base = self._attend(self.input_layernorm(hidden_states), context) + hidden_states
            return self._make(self.post_attention_layernorm(base), context) + base
        norms = self.input_layernorm, self.post_attention_layernorm
        residual, attention_input, mlp_input = two_norms(hidden_states, *norms)
        attended = self._attend(attention_input, context)
        made = self._make(mlp_input, context)
        if self.canon is None:
            return add_branches(made, attended, residual)  # In transformers' order, for its bits.
        return add_branches(attended, residual, made)

    def _attend(self, normalized: Tensor, context: Context) -> Tensor:
        """Return the branch of attention."""
        read = self._with_canon("A", normalized, context)
        return self.post_attention_dropout(self.attention(read, context)[0])

    def _make(self, normalized: Tensor, context: Context) -> Tensor:
        """Return the branch of the MLP."""
        read = self._with_canon("C", normalized, context)
        return self.post_mlp_dropout(self._feed_forward(read, context))

    def _feed_forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        mlp = self.mlp
        if self.canon is None or "D" not in self.canon:
            return mlp(hidden_states)
        inner = self._with_canon("D", mlp.dense_h_to_4h(hidden_states), context)
        return mlp.dense_4h_to_h(mlp.act(inner))


class CatLlamaRMSNorm(LlamaRMSNorm):
    """Llama's norm, whose weight is exempt from weight decay."""

    no_decay = ("weight",)


class CatLlamaAttention(ConvolvedAttention, LlamaAttention):
    """`CatAttention` with Llama's projections; filters and biases belong to `convolution`."""

    eager_attention = staticmethod(modeling_llama.eager_attention_forward)
    rotate = staticmethod(modeling_llama.apply_rotary_pos_emb)
    output_name = "o_proj"

    def __init__(self, config: AttentionSettings, layer_idx: int):
        super().__init__(config, layer_idx)
        self._add_convolution(config, {f"{s}_bias": getattr(self, f"{s}_proj") for s in STREAMS})

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"{stream}_proj")(x) for stream in STREAMS)

    def _split(self, *projected: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.unflatten(2, (-1, self.head_dim)) for x in projected)


class CatLlamaLayer(CanonBlock, LlamaDecoderLayer):
    """Llama's layer with `CatLlamaAttention`, and Canon layers if configured."""

    def __init__(self, config: AttentionSettings, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = CatLlamaAttention(config, layer_idx)
        self.mlp.down_proj.writes_residual = True
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, CatLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self._add_canon(config, 2 * config.intermediate_size)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        read = self._with_canon("A", self.input_layernorm(hidden_states), context)
        stream = hidden_states + self.self_attn(read, context)[0]
        read = self._with_canon("C", self.post_attention_layernorm(stream), context)
        return stream + self._feed_forward(read, context)

    def _feed_forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Compute the MLP; gate and values pass the Canon layer side by side."""
        mlp = self.mlp
        if self.canon is None or "D" not in self.canon:
            return mlp(hidden_states)
        both = torch.cat([mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)], dim=-1)
        gate, values = self._with_canon("D", both, context).chunk(2, dim=-1)
        return mlp.down_proj(mlp.act_fn(gate) * values)
