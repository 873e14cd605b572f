"""`CatGlaForCausalLM`, `CatDeltaNetForCausalLM` and `CatGatedDeltaNetForCausalLM`.

    h ← h + attn(RMSNorm(h)),   h ← h + W_down (SiLU(W_gate n) ⊙ W_up n),  n = RMSNorm(h)

in every layer, a last RMSNorm, and the head. The parameters' names are those of
flash-linear-attention's models, of which only `attn` differs from family to family.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from cat_lm.mixers.kinds.deltanet import DeltaRule
from cat_lm.mixers.kinds.gated_deltanet import GatedDeltaRule
from cat_lm.mixers.kinds.gla import GatedLinearAttention
from cat_lm.mixers.parts.linear import LinearMixer
from cat_lm.model.blocks.residual import Block, GatedMLP
from cat_lm.model.hf.causal_lm import CausalBody
from cat_lm.model.hf.configuration_linear import (
    CatDeltaNetConfig,
    CatGatedDeltaNetConfig,
    CatGlaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    LinearConfig,
)
from cat_lm.model.hf.recurrent import RecurrentCausalLM, RecurrentPreTrained
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class LinearLayer(Block):
    """RMSNorm and the mixer, RMSNorm and the MLP, by their names in flash-linear-attention."""


class LinearPreTrainedModel(RecurrentPreTrained, PreTrainedModel):
    """Share with the classes below what transformers may do."""

    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    _no_split_modules = ("LinearLayer",)
    _can_record_outputs = {"hidden_states": LinearLayer}  # noqa: RUF012


class LinearModel(CausalBody, LinearPreTrainedModel):
    """The model without its head; a family names its mixer."""

    mixer: ClassVar[type[LinearMixer]]

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.norm_eps
        self.embeddings = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(
            LinearLayer(
                nn.RMSNorm(width, eps),
                self._make_mixer(),
                nn.RMSNorm(width, eps),
                GatedMLP(width, config.intermediate_size),
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(width, eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _make_mixer(self) -> LinearMixer:
        config = self.config
        return self.mixer(
            config.hidden_size,
            config.num_heads,
            config.key_channels,
            config.value_channels,
            window=config.window,
            conv_std=config.initializer_range if config.conv_init == "normal" else None,
            is_gated=config.gated_output,
            norm_eps=config.norm_eps,
        )

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
