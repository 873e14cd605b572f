"""`CatMamba2ForCausalLM`: Mamba-2 (Dao and Gu, 2024), with the library's names of parameters."""

from __future__ import annotations

from cat_lm.mixers.kinds.mamba import Mamba2Mixer
from cat_lm.model.hf.configuration_mamba import CatMamba2Config
from cat_lm.model.hf.modeling_mamba import (
    CatMambaForCausalLM,
    CatMambaModel,
    MambaLayer,
    starts_of,
)


class Mamba2Layer(MambaLayer):
    """Mamba's layer around `Mamba2Mixer`."""


class CatMamba2Model(CatMambaModel):
    """The model without its head."""

    config_class = CatMamba2Config
    config: CatMamba2Config
    layer_class = Mamba2Layer
    _no_split_modules = ("Mamba2Layer",)
    _can_record_outputs = {"hidden_states": Mamba2Layer}  # noqa: RUF012

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
            starts=starts_of(config),
        )


class CatMamba2ForCausalLM(CatMambaForCausalLM):
    """The language model. `state_dict()` has the names of transformers' Mamba-2."""

    config_class = CatMamba2Config
    config: CatMamba2Config
    body_class = CatMamba2Model
    _no_split_modules = ("Mamba2Layer",)
    _can_record_outputs = {"hidden_states": Mamba2Layer}  # noqa: RUF012
