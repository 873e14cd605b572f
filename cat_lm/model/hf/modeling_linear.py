"""`CatGlaForCausalLM`, `CatDeltaNetForCausalLM` and `CatGatedDeltaNetForCausalLM`.

    h ← h + attn(RMSNorm(h)),   h ← h + W_down (SiLU(W_gate n) ⊙ W_up n),  n = RMSNorm(h)

in every layer, a last RMSNorm, and the head. The parameters' names are those of
flash-linear-attention's models, of which only `attn` differs from family to family.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cat_lm.model.hf.configuration_linear import (
    CatDeltaNetConfig,
    CatGatedDeltaNetConfig,
    CatGlaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    LinearConfig,
)
from cat_lm.model.hf.modeling_mixer import GatedMLP
from cat_lm.model.hf.recurrent import RecurrentBody, RecurrentCausalLM, RecurrentPreTrained, mix
from cat_lm.model.linear_mixers import (
    DeltaRule,
    GatedDeltaRule,
    GatedLinearAttention,
    LinearMixer,
)
from cat_lm.model.mixer_cache import MixerCache
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class LinearLayer(GradientCheckpointingLayer):
    """RMSNorm and the mixer, RMSNorm and the MLP, on the residual stream."""

    def __init__(self, config: LinearConfig, index: int, mixer: type[LinearMixer]) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.index = index
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attn = mixer(config)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        past_key_values: MixerCache | None = None,
    ) -> Tensor:
        """Compute [B, T, C]."""
        how = (document_ids, padding_mask, past_key_values)
        mixed = mix(self.attn, self.attn_norm(hidden_states), self.index, *how)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class LinearPreTrainedModel(RecurrentPreTrained, PreTrainedModel):
    """Share with the classes below what transformers may do."""

    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    _no_split_modules = ("LinearLayer",)
    _can_record_outputs = {"hidden_states": LinearLayer}  # noqa: RUF012


class LinearModel(RecurrentBody, LinearPreTrainedModel):
    """The model without its head; a family names its mixer."""

    mixer: ClassVar[type[LinearMixer]]

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LinearLayer(config, index, self.mixer) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)


class LinearForCausalLM(RecurrentCausalLM, LinearPreTrainedModel, GenerationMixin):
    """The language model; a family names the class of its body."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    body: ClassVar[type[LinearModel]]

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.model = self.body(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class CatGlaModel(LinearModel):
    """GLA without its head."""

    config_class = CatGlaConfig
    mixer = GatedLinearAttention


class CatGlaForCausalLM(LinearForCausalLM):
    """GLA."""

    config_class = CatGlaConfig
    body = CatGlaModel


class CatDeltaNetModel(LinearModel):
    """DeltaNet without its head."""

    config_class = CatDeltaNetConfig
    mixer = DeltaRule


class CatDeltaNetForCausalLM(LinearForCausalLM):
    """DeltaNet."""

    config_class = CatDeltaNetConfig
    body = CatDeltaNetModel


class CatGatedDeltaNetModel(LinearModel):
    """Gated DeltaNet without its head."""

    config_class = CatGatedDeltaNetConfig
    mixer = GatedDeltaRule


class CatGatedDeltaNetForCausalLM(LinearForCausalLM):
    """Gated DeltaNet."""

    config_class = CatGatedDeltaNetConfig
    body = CatGatedDeltaNetModel


# What `cat_lm.export --library` writes: the same, by the names of flash-linear-attention's classes.


class GLAForCausalLM(CatGlaForCausalLM):
    """GLA, for flash-linear-attention."""

    config_class = GLAConfig


class DeltaNetForCausalLM(CatDeltaNetForCausalLM):
    """DeltaNet, for flash-linear-attention."""

    config_class = DeltaNetConfig


class GatedDeltaNetForCausalLM(CatGatedDeltaNetForCausalLM):
    """Gated DeltaNet, for flash-linear-attention."""

    config_class = GatedDeltaNetConfig
