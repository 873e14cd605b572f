"""`CatMixerForCausalLM`: a language model around any mixer of `cat_lm.mixers`.

    h ← h + mixer(RMSNorm(h)),   h ← h + W_down (SiLU(W_gate n) ⊙ W_up n),  n = RMSNorm(h)

in every layer, a last RMSNorm, and the head. A mixer that keeps documents apart, minds padding and
has a decoding state says so (`MixerKind.supports`); what it cannot do is refused. Without a state
generation computes the whole text anew for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init

from cat_lm.core.errors import UserError
from cat_lm.core.parameters import kept_parts
from cat_lm.mixers import Setting, mixer_of
from cat_lm.model.blocks.residual import Block, GatedMLP
from cat_lm.model.context import Context
from cat_lm.model.hf.causal_lm import CausalBody, CausalLanguageModel
from cat_lm.model.hf.configuration_mixer import CatMixerConfig
from cat_lm.model.hf.pretrained import RecurrentPreTrained
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead
from cat_lm.ops.runtime.fake import is_fake


class MixerLayer(Block):
    """RMSNorm and the mixer, RMSNorm and the MLP, on the residual stream."""

    names = ("mixer_norm", "mlp_norm", "mixer", "mlp")

    def __init__(self, config: CatMixerConfig, index: int) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        setting = Setting(width, index, config.num_hidden_layers)
        mixer = mixer_of(config)
        norms = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        mlp = width, config.intermediate_size
        super().__init__(norms[0], mixer.build(setting), norms[1], GatedMLP(*mlp))
        self._mark_as_built(setting)

    def _mark_as_built(self, setting: Setting) -> None:
        """Mark each part of the mixer that keeps what its constructor drew with its place."""
        # On the meta device the constructors ran for names and shapes alone.
        lacks, kept = any(p.is_meta for p in self.mixer.parameters()), kept_parts(self.mixer)
        for name, module in self.mixer.named_modules():
            if module in kept or not isinstance(module, nn.Linear | nn.Embedding):
                module.as_built = (setting, name, lacks)


class MixerPreTrainedModel(RecurrentPreTrained, PreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatMixerConfig
    config: CatMixerConfig
    base_model_prefix = "model"
    _no_split_modules = ("MixerLayer",)
    _can_record_outputs = {"hidden_states": MixerLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's own parameters; those that were loaded are left alone."""
        if not hasattr(module, "as_built"):
            super()._init_weights(module)
            return
        setting, name, lacks = module.as_built
        if lacks:
            self._draw(module, setting, name)

    def _draw(self, module: nn.Module, setting: Setting, name: str) -> None:
        """Set what a checkpoint lacks of a part of a mixer to the values that a new one has."""
        fresh = mixer_of(self.config).build(setting).get_submodule(name)
        for key, value in fresh.named_parameters(recurse=False):
            init.copy_(module.get_parameter(key), value)


class CatMixerModel(CausalBody, MixerPreTrainedModel):
    """The model without its head."""

    def __init__(self, config: CatMixerConfig) -> None:
        super().__init__(config)
        mixer = mixer_of(config)
        self.supports = mixer.kind.supports
        self.attention = mixer.kind.layout_settings(mixer.options, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        rows = config.learned_positions
        self.embed_positions = None if rows is None else nn.Embedding(rows, config.hidden_size)
        self.layers = nn.ModuleList(
            MixerLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def layout_settings(self) -> Any:
        """The settings of the mixer's attention; the configuration where it has none."""
        return self.config if self.attention is None else self.attention

    def _enter(self, inputs_embeds: Tensor, context: Context) -> Tensor:
        """Add the table of positions; leave out of the context what the mixer cannot read."""
        self._check(context)
        if self.embed_positions is None:
            return inputs_embeds
        return inputs_embeds + self._positions(context.positions)

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)

    def _check(self, context: Context) -> None:
        """Check that the mixer can read documents and padding. Raises ValueError."""
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
            raise UserError(
                f"a sequence of {int(position_ids.max()) + 1} tokens: the model's table of "
                f"positions has learned_positions={rows} rows; give fewer tokens"
            )
        return self.embed_positions(position_ids)


class CatMixerForCausalLM(CausalLanguageModel, MixerPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: CatMixerConfig) -> None:
        super().__init__(config)
        self.model = CatMixerModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.collects_losses = any(
            getattr(layer.mixer, "adds_losses", False) for layer in self.model.layers
        )
        self.post_init()
