"""What language models share whose layers keep a state in the place of keys and values.

Mixins before a family's own of transformers: `cat_lm.model.hf.settings.RecurrentSettings` for the
configuration, `RecurrentPreTrained` for what is common to body and model, `RecurrentBody` for the
loop over layers, `RecurrentCausalLM` for the model with its head. A layer calls `mix`; what its
mixer takes is said in `cat_lm.mixers.base`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.model.hf.masks import check_call, documents_of, padding_of
from cat_lm.model.hf.starts import AsksForStarts
from cat_lm.model.mixer_cache import MixerCache, cache_for
from cat_lm.model.sequence import SequenceGroup, check_divided


def mix(
    mixer: nn.Module,
    x: Tensor,
    index: int,
    document_ids: Tensor | None,
    padding_mask: Tensor | None,
    cache: MixerCache | None,
    auxiliary_losses: list[Tensor] | None = None,
) -> Tensor:
    """Run the mixer of layer `index` on x [B, T, C], from its part of the cache and on into it.

    Arguments that say nothing do not reach the mixer, which may not take them.
    """
    how: dict[str, Any] = {"document_ids": document_ids, "padding_mask": padding_mask}
    if cache is not None:
        layer = cache.layers[index]
        how["state"] = layer.state
        layer.length += x.shape[1]
    if getattr(mixer, "adds_losses", False):
        how["auxiliary_losses"] = auxiliary_losses
    return mixer(x, **{name: value for name, value in how.items() if value is not None})


class RecurrentPreTrained(AsksForStarts):
    """Declare what transformers may do, and initialise.

    Linear layers and embeddings start from N(0, `initializer_range`), their biases from 0 and norms
    from 1. A module whose parameters, or whose parts', start otherwise gives them by name in
    `initial_values()`, see `cat_lm.core.parameters`.
    """

    supports_gradient_checkpointing = True
    # accelerate would pass copies of these arguments, but layers write into them.
    _skip_keys_device_placement = ("past_key_values", "state", "auxiliary_losses")
    _supports_context_parallel = False  # but for `cat_lm.model.sequence`
    _is_stateful = True  # no drafted token can be taken back

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's own parameters; those that were loaded are left alone."""
        if isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)


class RecurrentBody:
    """The forward of a model without its head; a family gives `layers` and `_leave`."""

    sequence_group: SequenceGroup | None = None

    def _enter(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor | None,
        cache: MixerCache | None,
    ) -> Tensor:
        """Do what comes between the embeddings [B, T, C] and the first layer."""
        return embedded

    def _leave(self, hidden_states: Tensor) -> Tensor:
        """Do what comes after the last layer: the final norm. [B, T, C]"""
        raise NotImplementedError

    def _readable(self, documents: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return the padding that the layers mind. Raises ValueError where they cannot do it."""
        return padding

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        auxiliary_losses: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states [B, T, C] after the last norm; see `CausalLanguageModel`.

        Layers get `auxiliary_losses` where they are asked for.
        """
        asked = {} if auxiliary_losses is None else {"auxiliary_losses": auxiliary_losses}
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        said = position_ids, attention_mask, padding_mask, document_ids, past_key_values
        check_call(self.config, kwargs, *said)
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        cache = cache_for(self.config, past_key_values, use_cache)
        check_divided(self.sequence_group, attention_mask, padding_mask, cache)
        batch, time, _ = inputs_embeds.shape
        told = position_ids, attention_mask, cache, kwargs, (batch, time)
        documents = documents_of(document_ids, *told)
        padding = padding_of(self.config, attention_mask, padding_mask, time, documents, cache)
        padding = self._readable(documents, padding)
        hidden_states = self._enter(inputs_embeds, attention_mask, position_ids, documents, cache)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                document_ids=documents,
                padding_mask=padding,
                past_key_values=cache,
                **asked,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self._leave(hidden_states), past_key_values=cache
        )


class RecurrentCausalLM(CausalLanguageModel):
    """A language model whose cache holds states."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Set the cache of states for generation; layers without a state have none."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: the states of mixers have none")
        asked = generation_config.use_cache is not False
        cache = cache_for(self.config, model_kwargs.get("past_key_values"), asked)
        if cache is None:
            generation_config.use_cache = model_kwargs["use_cache"] = False
        else:
            model_kwargs["past_key_values"] = cache
