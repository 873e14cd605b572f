"""Language models around any mixer of `cat_lm.mixers`: RMS norms and a gated MLP beside it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cat_lm import mixers
from cat_lm.architectures.base import Architecture, Classes, ModelSection
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.mixers import Mixer, Setting, mixer_of, mixer_problems
from cat_lm.model.attention.objective import Objective
from cat_lm.model.rules import gated_width

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# Options that change no weight's meaning, or only what it starts from.
_FREE_OPTIONS = frozenset({"dropout", "operator", "init"})


def _known_mixer(name: str) -> str:
    if name not in mixers.names():
        where = "; its options are mixer_options" if ":" in name else ""
        raise ValueError(f"must be one of {', '.join(mixers.names())}{where}")
    return name


class MixerSection(ModelSection):
    """Shape of the model and its mixer, in the names of CatMixerConfig."""

    architecture: Literal["mixer"] = "mixer"
    mixer: Annotated[str, AfterValidator(_known_mixer)] = Field(
        description="what mixes tokens, by its name in cat_lm/mixers"
    )
    mixer_options: dict[str, Any] = Field(
        default_factory=dict, description="as {heads: 4, window: 3}; see cat_lm/mixers"
    )
    intermediate_size: Annotated[int, whole(numbers.INTERMEDIATE_SIZE)] | None = Field(
        None, description="default: 8/3 x hidden_size, up to a multiple of 256"
    )
    learned_positions: Annotated[int, whole(numbers.CONTEXT)] | None = Field(
        None, description="rows of the table of positions, of a mixer that has one"
    )
    rms_norm_eps: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-6, description="added to mean squares in RMS norms"
    )
    initializer_range: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        0.02, description="standard deviation of first weights"
    )

    @property
    def inner_size(self) -> int:
        """The width of the MLP."""
        return self.intermediate_size or gated_width(self.hidden_size)


class MixerArchitecture(Architecture):
    """RMSNorm, a mixer, RMSNorm, SwiGLU in every layer."""

    name = "mixer"
    title = "Mixer"
    model_type = "cat_mixer"
    Section = MixerSection
    embedding = "model.embed_tokens.weight"
    layer_weight = "model.layers.{layer}.mlp.down_proj.weight"
    adapter_modules = ("gate_proj", "up_proj", "down_proj")  # the MLP's, whatever the mixer

    def config_class(self) -> type[PreTrainedConfig]:
        """Import `CatMixerConfig`."""
        from cat_lm.model.hf.configuration_mixer import CatMixerConfig

        return CatMixerConfig

    def classes(self) -> Classes:
        """Import `CatMixerConfig`, `CatMixerForCausalLM` and `CatMixerModel`."""
        from cat_lm.model.hf.modeling_mixer import CatMixerForCausalLM, CatMixerModel

        return Classes(self.config_class(), CatMixerForCausalLM, CatMixerModel)

    # Sections and configurations

    def fields(self, section: MixerSection, vocab_size: int, context_length: int) -> dict[str, Any]:
        """Return the arguments of `CatMixerConfig`; all options, so that no default can change."""
        return super().fields(section, vocab_size, context_length) | {
            "mixer_options": asdict(mixer_of(section).options),
            "intermediate_size": section.inner_size,
        }

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json. Raises ValueError."""
        from cat_lm.model.hf.configuration_mixer import check_settings

        check_settings(settings)

    def differences(self, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
        """Compare as the base; of the mixer's options those that give the weights their meaning."""
        kept = [
            values | {"mixer_options": {k: v for k, v in options.items() if k not in _FREE_OPTIONS}}
            for values in (theirs, ours)
            for options in [values["mixer_options"]]
        ]
        return super().differences(*kept)

    def problems(self, section: MixerSection, context_length: int) -> list[str]:
        """Return what of mixer and sizes does not go together."""
        found = mixer_problems(section)
        rows = section.learned_positions
        if not found and rows is not None and rows < context_length:
            found = [
                f"learned_positions={rows}: must be at least data.context_length={context_length}"
            ]
        return found

    def objective(self, section: MixerSection, train: Any) -> Objective:
        """Return the tokens' loss and the mixer's own."""
        return Objective(mixer_of(section).kind.own_loss)

    def isolates_documents(self, section: MixerSection) -> bool:
        """Return True if the mixer keeps documents apart."""
        return "documents" in mixer_of(section).kind.supports

    def portable(self, section: MixerSection) -> MixerSection:
        """Return the same model with this project's own operators."""
        if "operator" not in section.mixer_options:
            return section
        options = section.mixer_options | {"operator": "torch"}
        return section.model_copy(update={"mixer_options": options})

    # Words

    def words(self, section: MixerSection) -> str:
        """Name the mixer and what of its options is not the default."""
        return mixer_of(section).label

    def facts(self, section: MixerSection) -> dict[str, Any]:
        """Return the mixer."""
        return {"mixer": mixer_of(section).label}

    def variant(self, section: MixerSection) -> str:
        """Name the mixer."""
        return section.mixer

    def variants(self) -> dict[str, str]:
        """Return every mixer."""
        return {name: name for name in mixers.names()}

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return the mixer, with as many heads and as long tables as it takes."""
        known = {field.name for field in dataclasses.fields(mixers.get(variant).Options)}
        sizes = {"heads": heads, "length": context_length}
        options = {key: value for key, value in sizes.items() if key in known}
        keys = {"mixer": variant, "mixer_options": options}
        if mixers.make(variant, options).learned_positions:
            keys["learned_positions"] = context_length
        return keys

    def decodes(self, variant: str) -> bool:
        """Return True if the mixer has a decoding state."""
        # This project's all have one, and need not be imported for it.
        return variant in mixers.MIXERS.own_names() or "state" in mixers.get(variant).supports

    def describe_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Name the mixer, which chooses its operators by itself."""
        if backend != "auto":
            raise ValueError("a mixer chooses what computes it by itself; use auto")
        return f"mixer {self.words(self.section(config))}, by what suits the device"

    def describe_mixer_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Return nothing beside `describe_backend`; a mixer has its own option `operator`."""
        if backend != "auto":
            raise ValueError("a mixer has an option for it: model.mixer_options={operator: …}")
        return ""


@functools.cache
def _count(mixer: Mixer, setting: Setting) -> tuple[int, int]:
    """Count the parameters of a layer's mixer, and of its linear layers' weights."""
    import torch
    from torch import nn

    with torch.device("meta"):
        module = mixer.build(setting)
    matrices = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    return sum(p.numel() for p in module.parameters()), matrices


ENTRY = MixerArchitecture()
