"""What language models share whose layers keep a state in the place of keys and values.

Mixins before a family's own of transformers: `cat_lm.model.hf.settings.RecurrentSettings` for the
configuration, `RecurrentPreTrained` for what is common to body and model, `RecurrentCausalLM` for
the model with its head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from cat_lm.model.cache import CatCache, attach_layer_state
from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.model.hf.starts import AsksForStarts


class RecurrentPreTrained(AsksForStarts):
    """Declare what transformers may do, and initialise.

    Linear layers and embeddings start from N(0, `initializer_range`), their biases from 0 and norms
    from 1. A module whose parameters, or whose parts', start otherwise gives them by name in
    `initial_values()`, see `cat_lm.core.parameters`.
    """

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ("past_key_values", "auxiliary_losses")
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


class RecurrentCausalLM(CausalLanguageModel):
    """A language model whose cache holds states."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Set the cache of states for generation; layers without a state have none."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: the states of mixers have none")
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            attach_layer_state(cache, self.config)
        elif self.config.keeps_state and generation_config.use_cache is not False:
            cache = model_kwargs["past_key_values"] = CatCache(self.config)
        if cache is None:
            generation_config.use_cache = model_kwargs["use_cache"] = False
