"""The model: configuration, attention with convolutions, initialisation, loss."""

from __future__ import annotations

import importlib
from typing import Any

_CLASSES = {
    "cache": ("CatCache",),
    "hf.configuration": (
        *("CatConfig", "CatLlamaConfig"),
        *("CatMixerConfig", "CatGlaConfig", "CatDeltaNetConfig", "CatGatedDeltaNetConfig"),
        *("CatMambaConfig", "CatMamba2Config"),
    ),
    "hf.modeling": ("CatForCausalLM", "CatModel", "CatLlamaForCausalLM", "CatLlamaModel"),
    "hf.modeling_recurrent": (
        *("CatMixerForCausalLM", "CatMixerModel", "CatGlaForCausalLM", "CatGlaModel"),
        *("CatDeltaNetForCausalLM", "CatDeltaNetModel"),
        *("CatGatedDeltaNetForCausalLM", "CatGatedDeltaNetModel"),
        *("CatMambaForCausalLM", "CatMambaModel", "CatMamba2ForCausalLM", "CatMamba2Model"),
    ),
}
_HOMES = {name: f"{__name__}.{file}" for file, names in _CLASSES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Reading a configuration needs no torch, so the classes are imported lazily.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
