"""`CatLlamaForCausalLM`: Llama with convolution-augmented attention, on transformers' classes."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from cat_lm.model.attention.masks import check_attention
from cat_lm.model.blocks.transformer import CatLlamaAttention, CatLlamaLayer, CatLlamaRMSNorm
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel, PreTrainedMixin
from cat_lm.model.hf.configuration_llama import CatLlamaConfig
from cat_lm.model.rope import CatLlamaRotaryEmbedding
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


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
