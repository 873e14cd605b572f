"""`CatForCausalLM`: GPT-NeoX with convolution-augmented attention, on transformers' own classes."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXForCausalLM,
    GPTNeoXModel,
    GPTNeoXPreTrainedModel,
)

from cat_lm.model.attention.masks import check_attention
from cat_lm.model.blocks.transformer import CatAttention, CatLayer
from cat_lm.model.context import Context
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel, PreTrainedMixin
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.model.rope import CatRotaryEmbedding
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class CatPreTrainedModel(PreTrainedMixin, GPTNeoXPreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatConfig
    config: CatConfig
    _no_split_modules = ("CatLayer",)
    _can_record_outputs = {"hidden_states": CatLayer, "attentions": CatAttention}  # noqa: RUF012


class CatModel(CausalBody, CatPreTrainedModel, GPTNeoXModel):
    """The transformer without its head. Module names are GPT-NeoX's."""

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

    def _enter(self, inputs_embeds: Tensor, context: Context) -> Tensor:
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
