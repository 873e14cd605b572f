"""GPT-NeoX and Llama with convolution-augmented attention, on transformers' own classes.

How their parameters start, C being the width, L the number of layers, W the window, H the number of
heads:

| parameter                                    | distribution                | name       |
|----------------------------------------------|-----------------------------|------------|
| embed_in, query_key_value, dense_h_to_4h,    | normal, std sqrt(2 / (5 C)) | small-init |
| lm_head; of Llama embed_tokens, q_proj,      |                             |            |
| k_proj, v_proj, gate_proj, up_proj, lm_head  |                             |            |
| attention.dense, mlp.dense_4h_to_h; of Llama | normal, std 2 / (L sqrt(C)) | wang-init  |
| o_proj, down_proj                            |                             |            |
| biases                                       | 0                           |            |
| norms                                        | weight 1, bias 0            |            |
| filters, `conv_init: identity`               | 1 at lag 0, 0 elsewhere     |            |
|                                              | (of the same head, channel) |            |
| filters, `conv_init: uniform`                | uniform in ±1 / sqrt(W),    |            |
|                                              | multihead ±1 / sqrt(W H)    |            |
| filters, `conv_init: residual`               | identity + uniform          |            |
| long filters: coefficients and lag 0         | as above, W being N         |            |
| long filters: rates, turns                   | `cat_lm.ops.long_filter`    |            |
| filters of ranks beyond the first           | q: 1/64 at a lag of their   |            |
|                                              | own, k: 0                   |            |
| Canon filters, `canon_init: uniform`         | uniform in ±1 / sqrt(W)     |            |
| Canon filters, `canon_init: zero`            | 0                           |            |

Small-init is Nguyen and Salazar's (2019), wang-init Wang and Komatsuzaki's (GPT-J), as GPT-NeoX
uses both for Pythia. Recurrent families start as in their libraries, from a standard deviation of
0.02 at any width; for equal starts, configs/study sets `initializer_range` to sqrt(2 / (5 C)).
`uniform` is what `torch.nn.Conv1d` would draw; `residual` is where a Canon layer would start.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.llama import modeling_llama as llama

from cat_lm.model import attention
from cat_lm.model.attention.masks import check_attention
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.blocks import transformer as blocks
from cat_lm.model.context import Context
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel, InitialValuesMixin
from cat_lm.model.hf.configuration import CatConfig, CatLlamaConfig
from cat_lm.model.rope import CatLlamaRotaryEmbedding, CatRotaryEmbedding
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.model.streams.short_convolution import CanonLayer
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead

# What decides which configuration a name means.
_HUB_OPTIONS = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"),
    *("token", "trust_remote_code"),
)


class PreTrainedMixin(InitialValuesMixin):
    """A mixin, before `PreTrainedModel`, that initialises and loads the models of a family."""

    # Layers read the inputs of earlier tokens, which engines with a cache of their own do not keep.
    _supports_attention_backend = False

    def post_init(self) -> None:
        """Do what transformers does when a model is made; say if drafted tokens cannot go back."""
        super().post_init()
        # Of the instance: read off the class, a property would be true.
        self._is_stateful = self.config.has_long_filters

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's own parameters by the table above; loaded ones are kept."""
        if isinstance(module, nn.Linear | nn.Embedding):
            writes_residual = getattr(module, "writes_residual", False)
            std = (wang_init_std if writes_residual else small_init_std)(self.config)
            init.normal_(module.weight, mean=0.0, std=std)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, StreamPipeline):
            for name, values in module.draw_initial_values().items():
                init.copy_(getattr(module, name), values)
        elif isinstance(module, CanonLayer) and self.config.canon_init == "zero":
            init.zeros_(module.canon_filter)
        elif isinstance(module, CanonLayer):
            bound = 1 / math.sqrt(self.config.canon_window)
            init.uniform_(module.canon_filter, -bound, bound)
        else:
            # It initializes norms and the buffers of the rotary embedding.
            super()._init_weights(module)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Choose as transformers does; by default only among implementations that support the
        model.
        """
        if attn_implementation is None:
            attn_implementation = attention.usual_implementation(self.config)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, also from files of the library's own model class."""
        name_or_path, config = pretrained_model_name_or_path, kwargs.get("config")
        if not isinstance(config, cls.config_class):
            hub = {key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs}
            is_place = isinstance(config, str | os.PathLike)
            config = cls.config_class.from_pretrained(config if is_place else name_or_path, **hub)
        renamed = config.renamings(bool(config.convolved_streams)) | (
            kwargs.pop("key_mapping", None) or {}
        )
        loaded = super().from_pretrained(name_or_path, *args, key_mapping=renamed, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Saving would undo the renaming; files of this model have the names of its state_dict.
        model._weight_conversions = None
        return loaded


def small_init_std(config: AttentionSettings) -> float:
    """Return the standard deviation of weights that do not write to the residual stream."""
    return math.sqrt(2 / (5 * config.hidden_size))


def wang_init_std(config: AttentionSettings) -> float:
    """Return the standard deviation of a layer's two matrices that write to the residual stream."""
    return 2 / (config.num_hidden_layers * math.sqrt(config.hidden_size))


class CatPreTrainedModel(PreTrainedMixin, neox.GPTNeoXPreTrainedModel):
    """The configuration class, initialisation and supported features of the classes below."""

    config_class = CatConfig
    config: CatConfig
    _no_split_modules = ("CatLayer",)
    _can_record_outputs = {"hidden_states": blocks.CatLayer, "attentions": blocks.CatAttention}  # noqa: RUF012


class CatModel(CausalBody, CatPreTrainedModel, neox.GPTNeoXModel):
    """The transformer without its head. Module names are GPT-NeoX's."""

    def __init__(self, config: CatConfig):
        # GPTNeoXModel's own constructor would build every layer once more.
        super(neox.GPTNeoXModel, self).__init__(config)
        check_attention(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            blocks.CatLayer(config, index) for index in range(config.num_hidden_layers)
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
    """The configuration class, initialisation and supported features of the classes below."""

    config_class = CatLlamaConfig
    config: CatLlamaConfig
    _no_split_modules = ("CatLlamaLayer",)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": blocks.CatLlamaLayer,
        "attentions": blocks.CatLlamaAttention,
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
            blocks.CatLlamaLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = blocks.CatLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
