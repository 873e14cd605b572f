"""GPT-NeoX and Llama with convolution-augmented attention, on transformers' own classes."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.llama import modeling_llama as llama

from cat_lm.model.attention.masks import check_attention
from cat_lm.model.blocks.transformer import (
    CatAttention,
    CatLayer,
    CatLlamaAttention,
    CatLlamaLayer,
    CatLlamaRMSNorm,
)
from cat_lm.model.context import Context
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel
from cat_lm.model.hf.configuration import CatConfig, CatLlamaConfig
from cat_lm.model.hf.pretrained import PreTrainedMixin
from cat_lm.model.rope import CatLlamaRotaryEmbedding, CatRotaryEmbedding
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class CatPreTrainedModel(PreTrainedMixin, neox.GPTNeoXPreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatConfig
    config: CatConfig
    _no_split_modules = ("CatLayer",)
    _can_record_outputs = {"hidden_states": CatLayer, "attentions": CatAttention}  # noqa: RUF012


class CatModel(CausalBody, CatPreTrainedModel, neox.GPTNeoXModel):
    """The transformer without its head. Module names are GPT-NeoX's."""

    def __init__(self, config: CatConfig):
        # GPTNeoXModel's own constructor would build every layer once more.
        super(neox.GPTNeoXModel, self).__init__(config)
        check_attention(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            CatLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        rotates = config.position_embedding == "rope"
        self.rotary_emb = CatRotaryEmbedding(config) if rotates else None
        self.gradient_checkpointing = False
        self.post_init()

    def _enter(self, inputs_embeds: Tensor, context: Context) -> Tensor:
        return self.emb_dropout(inputs_embeds)

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.final_layer_norm(hidden_states)


class CatForCausalLM(CausalLanguageModel, CatPreTrainedModel, neox.GPTNeoXForCausalLM):
    """The language model. `state_dict()` has GPT-NeoX's names, and the filters beside them."""

    def __init__(self, config: CatConfig):
        super(neox.GPTNeoXForCausalLM, self).__init__(config)
        self.gpt_neox = CatModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class CatLlamaPreTrainedModel(PreTrainedMixin, llama.LlamaPreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatLlamaConfig
    config: CatLlamaConfig
    _no_split_modules = ("CatLlamaLayer",)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": CatLlamaLayer,
        "attentions": CatLlamaAttention,
    }


class CatLlamaModel(CausalBody, CatLlamaPreTrainedModel, llama.LlamaModel):
    """The transformer without its head. Module names are Llama's."""

    def __init__(self, config: CatLlamaConfig):
        # LlamaModel's own constructor would build every layer once more.
        super(llama.LlamaModel, self).__init__(config)
        check_attention(config)
        # Without a padding index, whose row would get no gradient: padding is often the token that
        # ends documents.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            CatLlamaLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = CatLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        rotates = config.position_embedding == "rope"
        self.rotary_emb = CatLlamaRotaryEmbedding(config) if rotates else None
        self.gradient_checkpointing = False
        self.post_init()

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)


class CatLlamaForCausalLM(CausalLanguageModel, CatLlamaPreTrainedModel, llama.LlamaForCausalLM):
    """The language model. `state_dict()` has Llama's names, and the filters beside them."""

    def __init__(self, config: CatLlamaConfig):
        super(llama.LlamaForCausalLM, self).__init__(config)
        self.model = CatLlamaModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
