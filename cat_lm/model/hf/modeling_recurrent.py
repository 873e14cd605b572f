"""Language models of recurrent layers: GLA, DeltaNets, Mambas, and any mixer of `cat_lm.mixers`.

    h ← h + attn(RMSNorm(h)),   h ← h + W_down (SiLU(W_gate n) ⊙ W_up n),  n = RMSNorm(h)

in every layer, a last RMSNorm, and the head. GLA and both DeltaNets have the parameters' names of
flash-linear-attention's models. A layer of Mamba (Gu and Dao, 2023) or Mamba-2 (Dao and Gu, 2024)
is one norm and the mixer, by the names of transformers, whose classes compute the same logits but
know no packed documents. What a mixer cannot do (`MixerKind.supports`) is refused; without a state
generation computes the whole text again for every token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init

from cat_lm.core.errors import UserError
from cat_lm.core.parameters import self_initialised_modules
from cat_lm.mixers import Setting, mixer_of
from cat_lm.mixers.kinds.deltanet import DeltaRule
from cat_lm.mixers.kinds.gated_deltanet import GatedDeltaRule
from cat_lm.mixers.kinds.gla import GatedLinearAttention
from cat_lm.mixers.kinds.mamba import Mamba2Mixer, MambaMixer, Starts
from cat_lm.mixers.parts.linear import LinearMixer
from cat_lm.model.blocks.residual import Block, GatedMLP
from cat_lm.model.context import Context
from cat_lm.model.hf import configuration
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel, InitialValuesMixin
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead
from cat_lm.ops.runtime.fake import is_fake


class RecurrentPreTrainedModel(InitialValuesMixin, PreTrainedModel):
    """The features that transformers may use, and the initialisation.

    Linear layers and embeddings start from N(0, `initializer_range`), their biases from 0 and norms
    from 1, all else as `initial_values()` say, see `cat_lm.core.parameters`.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # Drafted tokens cannot be removed from a recurrent state.
    _input_embed_layer = "embeddings"
    _no_split_modules = ("Block",)  # accelerate fails if a model has none of the listed classes.
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)


class RecurrentModel(CausalBody, RecurrentPreTrainedModel):
    """A model without its head; a family makes the layers.

    `norm_name` is that of the last norm, `epsilon_name` that of its configuration's ε.
    """

    norm_name, epsilon_name = "norm", "norm_eps"

    def __init__(self, config: configuration.RecurrentSettings) -> None:
        super().__init__(config)
        table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.add_module(self._input_embed_layer, table)
        self._add_tables()
        self.layers = nn.ModuleList(self._make_layer(n) for n in range(config.num_hidden_layers))
        self.add_module(self.norm_name, self._make_norm())
        self.gradient_checkpointing = False
        self.post_init()

    def _add_tables(self) -> None:
        """Add the lookup tables beside the token embeddings."""

    def _make_norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.config.hidden_size, getattr(self.config, self.epsilon_name))

    def _make_layer(self, index: int) -> Block:
        raise NotImplementedError

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.get_submodule(self.norm_name)(hidden_states)


class RecurrentForCausalLM(CausalLanguageModel, RecurrentPreTrainedModel, GenerationMixin):
    """A language model; a family names the class of its body."""

    body: ClassVar[type[RecurrentModel]]
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: configuration.RecurrentSettings) -> None:
        super().__init__(config)
        self.add_module(self.base_model_prefix, self.body(config))
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# flash-linear-attention's block


class LinearModel(RecurrentModel):
    """The model without its head; a family names its mixer."""

    mixer: ClassVar[type[LinearMixer]]

    def _make_layer(self, index: int) -> Block:
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


class CatGlaModel(LinearModel):
    config_class = configuration.CatGlaConfig
    mixer = GatedLinearAttention


class CatGlaForCausalLM(RecurrentForCausalLM):
    config_class = configuration.CatGlaConfig
    body = CatGlaModel


class CatDeltaNetModel(LinearModel):
    config_class = configuration.CatDeltaNetConfig
    mixer = DeltaRule


class CatDeltaNetForCausalLM(RecurrentForCausalLM):
    config_class = configuration.CatDeltaNetConfig
    body = CatDeltaNetModel


class CatGatedDeltaNetModel(LinearModel):
    config_class = configuration.CatGatedDeltaNetConfig
    mixer = GatedDeltaRule


class CatGatedDeltaNetForCausalLM(RecurrentForCausalLM):
    config_class = configuration.CatGatedDeltaNetConfig
    body = CatGatedDeltaNetModel


# What `cat_lm.export --library` writes: the same, by the names of flash-linear-attention's classes.


class GLAForCausalLM(CatGlaForCausalLM):
    config_class = configuration.GLAConfig


class DeltaNetForCausalLM(CatDeltaNetForCausalLM):
    config_class = configuration.DeltaNetConfig


class GatedDeltaNetForCausalLM(CatGatedDeltaNetForCausalLM):
    config_class = configuration.GatedDeltaNetConfig


# Mamba's block


class MambaBlock(Block):
    """The norm and the mixer, by their names in transformers' Mamba."""

    names = ("norm", "mlp_norm", "mixer", "mlp")


class CatMambaModel(RecurrentModel):
    config_class = configuration.CatMambaConfig
    base_model_prefix = "backbone"
    _no_split_modules = ("MambaBlock",)
    norm_name, epsilon_name = "norm_f", "layer_norm_epsilon"

    def _make_layer(self, index: int) -> MambaBlock:
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
        config = self.config
        layers = config.num_hidden_layers if config.rescale_prenorm_residual else None
        bounds = config.time_step_max, config.time_step_min, config.time_step_floor
        return Starts(*bounds, layers=layers)

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm_f(hidden_states.to(self.norm_f.weight.dtype))


class CatMambaForCausalLM(RecurrentForCausalLM):
    """Mamba. `state_dict()` has the names of transformers' Mamba."""

    config_class = configuration.CatMambaConfig
    base_model_prefix = "backbone"
    _no_split_modules = ("MambaBlock",)
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    body = CatMambaModel


class CatMamba2Model(CatMambaModel):
    config_class = configuration.CatMamba2Config

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

    config_class = configuration.CatMamba2Config
    body = CatMamba2Model


# Any mixer


class MixerBlock(Block):
    """RMSNorm and the mixer, RMSNorm and the MLP."""

    names = ("mixer_norm", "mlp_norm", "mixer", "mlp")


class MixerPreTrainedModel(RecurrentPreTrainedModel):
    """Restores the values that mixers drew in their constructors."""

    config_class = configuration.CatMixerConfig
    _input_embed_layer = "embed_tokens"
    _no_split_modules = ("MixerBlock",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not hasattr(module, "as_built"):
            super()._init_weights(module)
            return
        setting, name, lacks = module.as_built
        if lacks:
            self._draw(module, setting, name)

    def _draw(self, module: nn.Module, setting: Setting, name: str) -> None:
        """Initialise the parameters of a mixer's part that a checkpoint lacks."""
        fresh = mixer_of(self.config).build(setting).get_submodule(name)
        for key, value in fresh.named_parameters(recurse=False):
            init.copy_(module.get_parameter(key), value)


class CatMixerModel(RecurrentModel, MixerPreTrainedModel):
    epsilon_name = "rms_norm_eps"

    def _add_tables(self) -> None:
        config, mixer = self.config, mixer_of(self.config)
        self.supports = mixer.kind.supports
        self.attention = mixer.kind.layout_settings(mixer.options, config.hidden_size)
        rows = config.learned_positions
        self.embed_positions = None if rows is None else nn.Embedding(rows, config.hidden_size)

    def _make_layer(self, index: int) -> MixerBlock:
        config = self.config
        setting = Setting(config.hidden_size, index, config.num_hidden_layers)
        mixer = mixer_of(config).build(setting)
        norms = self._make_norm(), self._make_norm()
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self._mark_as_built(mixer, setting)
        return MixerBlock(norms[0], mixer, norms[1], mlp)

    def _mark_as_built(self, mixer: nn.Module, setting: Setting) -> None:
        """Record, for each part of the mixer that draws its own values, where it belongs."""
        # On the meta device the constructors ran for names and shapes alone.
        lacks, kept = any(p.is_meta for p in mixer.parameters()), self_initialised_modules(mixer)
        for name, module in mixer.named_modules():
            if module in kept or not isinstance(module, nn.Linear | nn.Embedding):
                module.as_built = (setting, name, lacks)

    @property
    def layout_settings(self) -> Any:
        """Return the settings of the mixer's attention; the configuration if it has none."""
        return self.config if self.attention is None else self.attention

    def _enter(self, inputs_embeds: Tensor, context: Context) -> Tensor:
        """Add the position table; drop from the context what the mixer cannot read."""
        self._check(context)
        if self.embed_positions is None:
            return inputs_embeds
        return inputs_embeds + self._positions(context.positions)

    def _check(self, context: Context) -> None:
        name, padding = self.config.mixer, context.padding
        if context.documents is not None and "documents" not in self.supports:
            raise ValueError(f"document_ids: the mixer {name} cannot keep documents apart")
        if padding is None or "padding" in self.supports:
            return
        if (padding[:, 1:] & ~padding[:, :-1]).any():
            raise ValueError(
                f"attention_mask: the mixer {name} knows no padding; pad on the right, where no "
                "token reads it, or give rows of one length"
            )
        context.padding = None

    def _positions(self, position_ids: Tensor) -> Tensor:
        rows = self.config.learned_positions
        has_numbers = not torch.compiler.is_compiling() and not is_fake(position_ids)
        if has_numbers and int(position_ids.max()) >= rows:
            length, table = int(position_ids.max()) + 1, f"learned_positions={rows} rows"
            raise UserError(f"a sequence of {length} tokens: the model's table has {table}")
        return self.embed_positions(position_ids)


class CatMixerForCausalLM(RecurrentForCausalLM, MixerPreTrainedModel):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    body = CatMixerModel

    def __init__(self, config: configuration.CatMixerConfig) -> None:
        super().__init__(config)
        self.collects_losses = any(
            getattr(layer.mixer, "adds_losses", False) for layer in self.model.layers
        )
