"""Mamba: selective state spaces in the place of attention and MLP."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from cat_lm.architectures.base import (
    Architecture,
    Classes,
    ModelSection,
    halo_problems,
    head_division_problems,
)
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model.recurrent_rules import inner_size, step_problems, usual_rank
from cat_lm.model.rules import tap_problems

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_Start = Annotated[float, number(numbers.TIME_STEP)]


class StateSpaceSection(ModelSection):
    """What both Mambas have, in the names of `transformers`' configurations."""

    state_size: Annotated[int, whole(numbers.STATE_SIZE)] = Field(
        16, description="numbers of the state a channel"
    )
    conv_kernel: Annotated[int, whole(numbers.WINDOW)] = Field(
        4, description="taps of the short convolution"
    )
    expand: Annotated[int, whole(numbers.EXPANSION.at_least(1))] = Field(
        2, description="channels inside a layer over hidden_size"
    )
    use_bias: bool = Field(False, description="of the first and the last projection of a layer")
    use_conv_bias: bool = Field(True, description="a bias in the short convolution")
    layer_norm_epsilon: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-5, description="added to mean squares in RMS norms"
    )
    residual_in_fp32: bool = Field(True, description="the residual stream in bf16 training")
    initializer_range: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        0.02, description="standard deviation of first weights"
    )
    rescale_prenorm_residual: bool = Field(
        False, description="start the last projection of a layer with 1/sqrt(layers) of its size"
    )
    time_step_min: _Start = Field(0.001, description="least step size that a layer starts from")
    time_step_max: _Start = Field(0.1, description="largest step size that a layer starts from")
    time_step_floor: _Start = Field(1e-4, description="smaller first step sizes are raised to it")


class StateSpace(Architecture):
    """A family whose section is a `StateSpaceSection`; RMSNorm and a mixer in every layer."""

    embedding = "backbone.embeddings.weight"
    layer_weight = "backbone.layers.{layer}.mixer.in_proj.weight"
    recurrent = True
    unoffered_keys = ("hidden_act",)
    adapter_modules = ("in_proj", "out_proj")
    # These change what a model starts from, or how it rounds.
    free_keys = frozenset(
        {"initializer_range", "rescale_prenorm_residual", "residual_in_fp32"}
        | {"time_step_min", "time_step_max", "time_step_floor"}
    )

    def convolved_channels(self, section: Any) -> int:
        """Count the channels that a layer's short convolution reads."""
        raise NotImplementedError

    def problems(self, section: Any, context_length: int) -> list[str]:
        """Return what does not go together in a section."""
        windows = {"conv_kernel": section.conv_kernel}
        return [*step_problems(section), *tap_problems(windows, context_length)]

    def division_problems(self, section: Any, parts: int, context_length: int) -> list[str]:
        """Return whether channels, or parts shorter than filters, cannot be shared."""
        return [
            *head_division_problems(parts, self._divided_counts(section)),
            *halo_problems(parts, context_length, {"conv_kernel": section.conv_kernel}),
        ]

    def _divided_counts(self, section: Any) -> dict[str, int]:
        """Return what ranks share of a layer, by the key that decides it."""
        raise NotImplementedError

    # Words

    def words(self, section: Any) -> str:
        """Name the state's size and the short convolution."""
        return f"{section.state_size} numbers of state a channel, W={section.conv_kernel}"

    def facts(self, section: Any) -> dict[str, Any]:
        """Return the state's size."""
        return {"state_size": section.state_size}

    def describe_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the short convolutions; as in the base."""
        from cat_lm.model.streams.short_convolution import describe_backend

        channels = [self.convolved_channels(self.section(config))]
        return describe_backend(config.conv_kernel, channels, device, dtype, backend)

    def describe_mixer_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the scan; as in the base."""
        from cat_lm.ops.recurrence.backends import SELECTIVE_SCAN, describe_backend

        return describe_backend(SELECTIVE_SCAN, device, dtype, backend)


def _auto_or_rank(value: Any) -> Any:
    """Check a rank, which may be auto. Raises ValueError."""
    if value == "auto":
        return value
    with contextlib.suppress(ValueError):
        rank = numbers.check_whole(value, numbers.HIDDEN_SIZE)
        if type(rank) is int:
            return rank
    raise ValueError(f"must be auto, or a whole number from 1 to {numbers.HIDDEN_SIZE.high:,}")


class MambaSection(StateSpaceSection):
    """Shape of the model, in the names of `transformers`' Mamba and CatMambaConfig."""

    architecture: Literal["mamba"] = "mamba"
    time_step_rank: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_rank)] = Field(
        "auto", description="auto: hidden_size / 16, rounded up"
    )


class Mamba(StateSpace):
    """Every channel has a state of its own, and decays at rates of its own."""

    name = "mamba"
    title = "Mamba"
    model_type = "cat_mamba"
    library_type = "mamba"
    Section = MambaSection
    short_names: ClassVar[dict[str, str]] = {"": "mamba"}

    def config_class(self) -> type[PreTrainedConfig]:
        """Import `CatMambaConfig`."""
        from cat_lm.model.hf.configuration_mamba import CatMambaConfig

        return CatMambaConfig

    def classes(self) -> Classes:
        """Import `CatMambaConfig`, `CatMambaForCausalLM` and `CatMambaModel`."""
        from cat_lm.model.hf.modeling_mamba import CatMambaForCausalLM, CatMambaModel

        return Classes(self.config_class(), CatMambaForCausalLM, CatMambaModel)

    def library_classes(self) -> Classes:
        """Import transformers' Mamba."""
        from transformers import MambaConfig, MambaForCausalLM, MambaModel

        return Classes(MambaConfig, MambaForCausalLM, MambaModel)

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys, the rank as `auto` where it is the usual one."""
        values = super().section_values(config)
        usual = values["time_step_rank"] == usual_rank(values["hidden_size"])
        return values | ({"time_step_rank": "auto"} if usual else {})

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json of Mamba or CatMamba. Raises ValueError."""
        from cat_lm.model.hf.configuration_mamba import check_settings

        check_settings(settings, self.config_class())

    def _divided_counts(self, section: MambaSection) -> dict[str, int]:
        return {"expand x hidden_size": inner_size(section)}

    def convolved_channels(self, section: MambaSection) -> int:
        """Count the inner channels."""
        return inner_size(section)


ENTRY = Mamba()
