"""`CatMambaForCausalLM`: Mamba (Gu and Dao, 2023), with the library's names of parameters.

A layer is one norm and the mixer, without an MLP. Documents and padding are as of `cat_lm.mixers`;
the library's class, which knows neither packed documents nor how to go on from a state with several
tokens, computes the same logits.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from cat_lm.mixers.kinds.mamba import MambaMixer, Starts
from cat_lm.model.blocks.residual import Block
from cat_lm.model.hf.causal_lm import CausalBody
from cat_lm.model.hf.configuration_mamba import CatMamba2Config, CatMambaConfig
from cat_lm.model.hf.recurrent import RecurrentCausalLM, RecurrentPreTrained
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


class MambaLayer(Block):
    """The norm and the mixer, by their names in transformers' Mamba."""

    names = ("norm", "mlp_norm", "mixer", "mlp")


def starts_of(config: CatMambaConfig | CatMamba2Config) -> Starts:
    """Return what a layer's parameters start from."""
    layers = config.num_hidden_layers if config.rescale_prenorm_residual else None
    bounds = config.time_step_max, config.time_step_min, config.time_step_floor
    return Starts(*bounds, layers=layers)


class MambaPreTrainedModel(RecurrentPreTrained, PreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatMambaConfig
    config: CatMambaConfig
    base_model_prefix = "backbone"
    _input_embed_layer = "embeddings"
    _no_split_modules = ("MambaLayer",)
    _can_record_outputs = {"hidden_states": MambaLayer}  # noqa: RUF012


class CatMambaModel(CausalBody, MambaPreTrainedModel):
    """The model without its head."""

    layer_class: type[MambaLayer] = MambaLayer

    def __init__(self, config: CatMambaConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.embeddings = nn.Embedding(config.vocab_size, width)
        fp32 = config.residual_in_fp32
        self.layers = nn.ModuleList(
            self.layer_class(nn.RMSNorm(width, eps), self._make_mixer(), residual_in_fp32=fp32)
            for _ in range(config.num_hidden_layers)
        )
        self.norm_f = nn.RMSNorm(width, eps)
        self.gradient_checkpointing = False
        self.post_init()

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
            starts=starts_of(config),
        )

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm_f(hidden_states.to(self.norm_f.weight.dtype))


class CatMambaForCausalLM(RecurrentCausalLM, MambaPreTrainedModel, GenerationMixin):
    """The language model. `state_dict()` has the names of transformers' Mamba."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    body_class: type[CatMambaModel] = CatMambaModel

    def __init__(self, config: CatMambaConfig) -> None:
        super().__init__(config)
        self.backbone = self.body_class(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
