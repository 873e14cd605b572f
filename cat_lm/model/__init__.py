"""The model: configuration, attention with convolutions, initialisation, loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cat_lm.model.cache import CatCache
    from cat_lm.model.hf.configuration import CatConfig
    from cat_lm.model.hf.configuration_linear import (
        CatDeltaNetConfig,
        CatGatedDeltaNetConfig,
        CatGlaConfig,
    )
    from cat_lm.model.hf.configuration_llama import CatLlamaConfig
    from cat_lm.model.hf.configuration_mamba import CatMamba2Config, CatMambaConfig
    from cat_lm.model.hf.configuration_mixer import CatMixerConfig
    from cat_lm.model.hf.modeling import CatForCausalLM, CatModel
    from cat_lm.model.hf.modeling_linear import (
        CatDeltaNetForCausalLM,
        CatDeltaNetModel,
        CatGatedDeltaNetForCausalLM,
        CatGatedDeltaNetModel,
        CatGlaForCausalLM,
        CatGlaModel,
    )
    from cat_lm.model.hf.modeling_llama import CatLlamaForCausalLM, CatLlamaModel
    from cat_lm.model.hf.modeling_mamba import CatMambaForCausalLM, CatMambaModel
    from cat_lm.model.hf.modeling_mamba2 import CatMamba2ForCausalLM, CatMamba2Model
    from cat_lm.model.hf.modeling_mixer import CatMixerForCausalLM, CatMixerModel

__all__ = ["CatCache", "CatConfig", "CatForCausalLM", "CatModel"]
__all__ += ["CatLlamaConfig", "CatLlamaForCausalLM", "CatLlamaModel"]
__all__ += ["CatMambaConfig", "CatMambaForCausalLM", "CatMambaModel"]
__all__ += ["CatMamba2Config", "CatMamba2ForCausalLM", "CatMamba2Model"]
__all__ += ["CatMixerConfig", "CatMixerForCausalLM", "CatMixerModel"]
__all__ += ["CatGlaConfig", "CatGlaForCausalLM", "CatGlaModel"]
__all__ += ["CatDeltaNetConfig", "CatDeltaNetForCausalLM", "CatDeltaNetModel"]
__all__ += ["CatGatedDeltaNetConfig", "CatGatedDeltaNetForCausalLM", "CatGatedDeltaNetModel"]

_HOMES = {
    "CatCache": "cat_lm.model.cache",
    "CatConfig": "cat_lm.model.hf.configuration",
    "CatForCausalLM": "cat_lm.model.hf.modeling",
    "CatModel": "cat_lm.model.hf.modeling",
    "CatMixerConfig": "cat_lm.model.hf.configuration_mixer",
    "CatMixerForCausalLM": "cat_lm.model.hf.modeling_mixer",
    "CatMixerModel": "cat_lm.model.hf.modeling_mixer",
    "CatMambaConfig": "cat_lm.model.hf.configuration_mamba",
    "CatMambaForCausalLM": "cat_lm.model.hf.modeling_mamba",
    "CatMambaModel": "cat_lm.model.hf.modeling_mamba",
    "CatMamba2Config": "cat_lm.model.hf.configuration_mamba",
    "CatMamba2ForCausalLM": "cat_lm.model.hf.modeling_mamba2",
    "CatMamba2Model": "cat_lm.model.hf.modeling_mamba2",
    "CatGlaConfig": "cat_lm.model.hf.configuration_linear",
    "CatGlaForCausalLM": "cat_lm.model.hf.modeling_linear",
    "CatGlaModel": "cat_lm.model.hf.modeling_linear",
    "CatDeltaNetConfig": "cat_lm.model.hf.configuration_linear",
    "CatDeltaNetForCausalLM": "cat_lm.model.hf.modeling_linear",
    "CatDeltaNetModel": "cat_lm.model.hf.modeling_linear",
    "CatGatedDeltaNetConfig": "cat_lm.model.hf.configuration_linear",
    "CatGatedDeltaNetForCausalLM": "cat_lm.model.hf.modeling_linear",
    "CatGatedDeltaNetModel": "cat_lm.model.hf.modeling_linear",
    "CatLlamaConfig": "cat_lm.model.hf.configuration_llama",
    "CatLlamaForCausalLM": "cat_lm.model.hf.modeling_llama",
    "CatLlamaModel": "cat_lm.model.hf.modeling_llama",
}


def __getattr__(name: str) -> Any:
    # Reading a configuration needs no torch, so the classes are imported when asked for.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
