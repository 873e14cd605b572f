"""Language models of recurrent layers: GLA, DeltaNet, Gated DeltaNet, Mamba and Mamba-2.

    h ← h + attn(RMSNorm(h)),   h ← h + W_down (SiLU(W_gate n) ⊙ W_up n),  n = RMSNorm(h)

in every layer of the first three, a last RMSNorm, and the head. The parameters' names are those of
flash-linear-attention's models, of which only `attn` differs from family to family. A layer of
Mamba (Gu and Dao, 2023) or Mamba-2 (Dao and Gu, 2024) is one norm and the mixer, without an MLP, by
the names of transformers; its classes, which know neither packed documents nor how to go on from a
state with several tokens, compute the same logits.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from cat_lm.mixers.kinds.deltanet import DeltaRule
from cat_lm.mixers.kinds.gated_deltanet import GatedDeltaRule
from cat_lm.mixers.kinds.gla import GatedLinearAttention
from cat_lm.mixers.kinds.mamba import Mamba2Mixer, MambaMixer, Starts
from cat_lm.mixers.parts.linear import LinearMixer
from cat_lm.model.blocks.residual import Block, GatedMLP
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel
from cat_lm.model.hf.configuration_linear import (
    CatDeltaNetConfig,
    CatGatedDeltaNetConfig,
    CatGlaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    LinearConfig,
)
from cat_lm.model.hf.configuration_mamba import CatMamba2Config, CatMambaConfig
from cat_lm.model.hf.pretrained import RecurrentPreTrained
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class RecurrentPreTrainedModel(RecurrentPreTrained, PreTrainedModel):
    """Share with the classes below what transformers may do."""

    _input_embed_layer = "embeddings"
    _no_split_modules = ("Block", "MambaBlock")
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012


class RecurrentModel(CausalBody, RecurrentPreTrainedModel):
    """A model without its head; a family makes the layers.

    Attributes:
        norm_name, epsilon_name: of the last norm, and of its configuration's ε.
    """

    norm_name, epsilon_name = "norm", "norm_eps"

    def __init__(self, config: LinearConfig | CatMambaConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self._make_layer() for _ in range(config.num_hidden_layers))
        self.add_module(self.norm_name, self._make_norm())
        self.gradient_checkpointing = False
        self.post_init()

    def _make_norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.config.hidden_size, getattr(self.config, self.epsilon_name))

    def _make_layer(self) -> Block:
        raise NotImplementedError

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.get_submodule(self.norm_name)(hidden_states)


class RecurrentForCausalLM(CausalLanguageModel, RecurrentPreTrainedModel, GenerationMixin):
    """A language model; a family names the class of its body."""

    body: ClassVar[type[RecurrentModel]]

    def __init__(self, config: LinearConfig | CatMambaConfig) -> None:
        super().__init__(config)
        self.add_module(self.base_model_prefix, self.body(config))
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# flash-linear-attention's block


class LinearModel(RecurrentModel):
    """The model without its head; a family names its mixer."""

    base_model_prefix = "model"
    mixer: ClassVar[type[LinearMixer]]

    def _make_layer(self) -> Block:
        config = self.config
        norm, mixer, mlp_norm = self._make_norm(), self._make_mixer(), self._make_norm()
        return Block(norm, mixer, mlp_norm, GatedMLP(config.hidden_size, config.intermediate_size))

    def _make_mixer(self) -> LinearMixer:
        config, shape = self.config, self.config.section
        return self.mixer(
            config.hidden_size,
            config.num_heads,
            shape.key_channels,
            shape.value_channels,
            window=shape.window,
            conv_std=config.initializer_range if config.conv_init == "normal" else None,
            is_gated=shape.gated_output,
            norm_eps=config.norm_eps,
        )


class LinearForCausalLM(RecurrentForCausalLM):
    """The language model; a family names the class of its body."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012


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


# Mamba's block


class MambaBlock(Block):
    """The norm and the mixer, by their names in transformers' Mamba."""

    names = ("norm", "mlp_norm", "mixer", "mlp")


class CatMambaModel(RecurrentModel):
    """Mamba without its head."""

    config_class = CatMambaConfig
    base_model_prefix = "backbone"
    norm_name, epsilon_name = "norm_f", "layer_norm_epsilon"

    def _make_layer(self) -> MambaBlock:
        fp32 = self.config.residual_in_fp32
        return MambaBlock(self._make_norm(), self._make_mixer(), residual_in_fp32=fp32)

    def _make_mixer(self) -> nn.Module:
        config = self.config
        return MambaMixer(
            config.hidden_size,
            config.intermediate_size,
            config.state_size,
            config.conv_kernel,
            config.time_step_rank,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            starts=self._starts(),
        )

    def _starts(self) -> Starts:
        """Return what a layer's parameters start from."""
        config = self.config
        layers = config.num_hidden_layers if config.rescale_prenorm_residual else None
        bounds = config.time_step_max, config.time_step_min, config.time_step_floor
        return Starts(*bounds, layers=layers)

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm_f(hidden_states.to(self.norm_f.weight.dtype))


class CatMambaForCausalLM(RecurrentForCausalLM):
    """Mamba. `state_dict()` has the names of transformers' Mamba."""

    config_class = CatMambaConfig
    base_model_prefix = "backbone"
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    body = CatMambaModel


class CatMamba2Model(CatMambaModel):
    """Mamba-2 without its head."""

    config_class = CatMamba2Config

    def _make_mixer(self) -> Mamba2Mixer:
        config = self.config
        return Mamba2Mixer(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            config.state_size,
            config.n_groups,
            config.conv_kernel,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            step_limit=config.time_step_limit,
            norm_eps=config.layer_norm_epsilon,
            starts=self._starts(),
        )


class CatMamba2ForCausalLM(CatMambaForCausalLM):
    """Mamba-2. `state_dict()` has the names of transformers' Mamba-2."""

    config_class = CatMamba2Config
    body = CatMamba2Model
