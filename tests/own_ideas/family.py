"""A family of models of one's own, `model.architecture: ngram`: each layer reads two tokens.

    h_t ← h_t + W_out relu²(W_in [n_t ; n_{t−1}]),   n = RMSNorm(h)

so that L layers read L + 1 tokens, as the feed-forward language model of Bengio et al. (2003).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from cat_lm.architectures import Architecture, Classes, ModelSection, register
from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class NgramSection(ModelSection):
    """The keys of `model:` beside those that every family has."""

    architecture: Literal["ngram"] = "ngram"
    expansion: int = 4


class Ngram(Architecture):
    """What there is to know before a model is made."""

    name = "ngram"
    title = "n-gram"
    model_type = "ngram"
    Section = NgramSection
    layer_weight = "model.layers.{layer}.out_proj.weight"

    def classes(self) -> Classes:
        return Classes(NgramConfig, NgramForCausalLM, NgramModel)

    def problems(self, section: NgramSection, context_length: int) -> list[str]:
        wrong = section.expansion < 1
        return [f"expansion={section.expansion}: must be at least 1"] if wrong else []


class NgramConfig(PreTrainedConfig):
    """The arguments are the section's keys, and the longest training sequence."""

    model_type = "ngram"

    vocab_size: int = 257
    hidden_size: int = 64
    num_hidden_layers: int = 2
    expansion: int = 4
    max_position_embeddings: int = 128
    tie_word_embeddings: bool = False


class NgramLayer(GradientCheckpointingLayer):
    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.expansion * config.hidden_size
        self.norm = nn.RMSNorm(width)
        self.in_proj = nn.Linear(2 * width, inner, bias=False)
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, h: Tensor, is_first: Tensor) -> Tensor:
        """Compute [B, T, C]; is_first [B, T, 1] is true where no token comes before."""
        n = self.norm(h)
        before = F.pad(n[:, :-1], (0, 0, 1, 0)).masked_fill(is_first, 0.0)
        return h + self.out_proj(F.relu(self.in_proj(torch.cat([n, before], dim=-1))) ** 2)


class NgramPreTrained(PreTrainedModel):
    config_class = NgramConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True


class NgramModel(NgramPreTrained):
    """The model without its head."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(NgramLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Compute [B, T, C]; see `CausalLanguageModel.forward`. It has no use for positions."""
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        is_first = torch.zeros(h.shape[:2], dtype=torch.bool, device=h.device)
        is_first[:, 0] = True
        if document_ids is not None:
            is_first[:, 1:] |= document_ids.diff(dim=1) != 0
        if attention_mask is not None:
            is_first[:, 1:] |= attention_mask[:, :-1] == 0
        for layer in self.layers:
            h = layer(h, is_first[..., None])
        return BaseModelOutputWithPast(last_hidden_state=self.norm(h))


class NgramForCausalLM(CausalLanguageModel, NgramPreTrained, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config)
        self.model = NgramModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


register(Ngram())
