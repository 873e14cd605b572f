"""Language models around any mixer of `cat_lm.mixers`: RMS norms and a gated MLP beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from cat_lm import mixers
from cat_lm.architectures.base import Architecture, Summary, sizes_of
from cat_lm.mixers import mixer_of
from cat_lm.model.attention import Objective
from cat_lm.model.hf.sections.recurrent import MixerSection

# These options change no weight's meaning, or only its initialization.
_FREE_OPTIONS = frozenset({"dropout", "init"})


class MixerArchitecture(Architecture):
    """RMSNorm, a mixer, RMSNorm, SwiGLU in every layer."""

    name = "mixer"
    title = "Mixer"
    model_type = "cat_mixer"
    class_prefix = "CatMixer"
    Section = MixerSection
    layer_weight = "model.layers.{layer}.mlp.down_proj.weight"
    adapter_modules = ("gate_proj", "up_proj", "down_proj")  # All mixers have the same MLP.

    def differences(self, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
        """Compare two models; of the mixer's options only those that give the weights their meaning
        count.
        """
        kept = [
            values | {"mixer_options": {k: v for k, v in options.items() if k not in _FREE_OPTIONS}}
            for values in (theirs, ours)
            for options in [values["mixer_options"]]
        ]
        return super().differences(*kept)

    def problems(self, section: MixerSection, context_length: int) -> list[str]:
        found, rows = super().problems(section, context_length), section.learned_positions
        if not found and rows is not None and rows < context_length:
            found = [
                f"learned_positions={rows}: must be at least data.context_length={context_length}"
            ]
        return found

    def objective(self, section: MixerSection, train: Any) -> Objective:
        return Objective(mixer_of(section).kind.own_loss)

    def summary(self, section: MixerSection) -> Summary:
        words = mixer_of(section).label
        return Summary(self.title, words, {"mixer": words}, sizes_of(section), section.mixer)

    def variants(self) -> dict[str, str]:
        return {name: name for name in mixers.names()}

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        known = {field.name for field in dataclasses.fields(mixers.get(variant).Options)}
        sizes = {"heads": heads, "length": context_length}
        options = {key: value for key, value in sizes.items() if key in known}
        keys = {"mixer": variant, "mixer_options": options}
        if mixers.make(variant, options).learned_positions:
            keys["learned_positions"] = context_length
        return keys

    def describe_backend(self, key: str, config: Any, *how: Any) -> str:
        if how[-1] != "auto":
            raise ValueError("a mixer chooses what computes it by itself; use auto")
        if key == "mixer_backend":
            return ""
        return f"mixer {mixer_of(config).label}, by what suits the device"


ENTRY = MixerArchitecture()
