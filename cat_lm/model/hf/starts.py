"""How transformers' models come to ask every module how its parameters start."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import initialization as init

from cat_lm.core.parameters import start


class AsksForStarts:
    """Asks a module for its `initial_values` after its parts; before a `PreTrainedModel`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse what `from_pretrained` has left over, which no model takes, as unknown keys."""
        takes = inspect.signature(cls.__init__).parameters
        if all(taken.kind is not taken.VAR_KEYWORD for taken in takes.values()):
            cls.config_class.refuse_keys(key for key in kwargs if key not in takes)
        return super().__new__(cls)

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Initialise a module's own parameters, and then those that it names.

        Here and not in `_init_weights`: transformers passes over a module without parameters of its
        own, or whose own were loaded, where it calls that. What was loaded is left alone.
        """
        has_started = getattr(module, "_is_hf_initialized", False)
        super()._initialize_weights(module, *args, **kwargs)
        is_loaded = all(getattr(p, "_is_hf_initialized", False) for p in module.parameters())
        if not (has_started or is_loaded):
            start(module, init.copy_)
