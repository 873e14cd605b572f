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
from cat_lm.mixers.parts.options import convolution_flops
from cat_lm.model.mamba_rules import inner_size, step_problems, usual_rank
from cat_lm.model.rules import tap_problems
from cat_lm.ops.recurrence import EVERY

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
    scan_flops: ClassVar[int]  # of a token and number of the state, forward and backward

    def state_numbers(self, section: Any) -> int:
        """Count the numbers of a layer's state, which are kept in fp32."""
        return inner_size(section) * section.state_size

    def convolved_channels(self, section: Any) -> int:
        """Count the channels that a layer's short convolution reads."""
        raise NotImplementedError

    def read_channels(self, section: Any) -> int:
        """Count what a layer's first projection makes."""
        raise NotImplementedError

    def layer_matrices(self, section: Any) -> int:
        """Count a layer's parameters that multiply once, beside its first and last projection."""
        raise NotImplementedError

    def layer_rates(self, section: Any) -> int:
        """Count a layer's parameters of steps, decays and what passes beside the state."""
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

    def _rates(self, section: Any) -> int:
        """Count the step sizes of a token."""
        raise NotImplementedError

    def exchanged_numbers(self, section: Any, parts: int) -> float:
        """Count what the scan reads and writes, step sizes, and B and C, which all ranks get."""
        numbers = 2 * inner_size(section) + 2 * self._rates(section)
        states = self.convolved_channels(section) - inner_size(section) or 2 * section.state_size
        return numbers * (parts - 1) / parts + states * (parts - 1)

    def num_parameters(self, section: Any, vocab_size: int) -> int:
        """Count the parameters."""
        width, read = section.hidden_size, self.read_channels(section)
        layer = width * (read + inner_size(section) + 1) + self.layer_matrices(section)
        layer += read + width if section.use_bias else 0
        tables = 1 if section.tie_word_embeddings else 2
        return (
            section.num_hidden_layers * layer
            + self.elementwise_parameters(section)
            + width
            + tables * (section.vocab_size or vocab_size) * width
        )

    def elementwise_parameters(self, section: Any) -> int:
        """Count filters with their biases, and rates."""
        taps = section.conv_kernel + section.use_conv_bias
        own = taps * self.convolved_channels(section) + self.layer_rates(section)
        return section.num_hidden_layers * own

    def mixing_flops(self, section: Any, context_length: int) -> float:
        """Count a token's FLOPs of scans and short convolutions, forward and backward."""
        scan = self.scan_flops * self.state_numbers(section)
        filters = convolution_flops(section.conv_kernel, self.convolved_channels(section))
        return section.num_hidden_layers * (scan + filters)

    def kept_states(self, section: Any) -> float:
        """Count the states that the scan keeps for its backward pass, in tensors of [B, T, C]."""
        return self.state_numbers(section) / EVERY / section.hidden_size

    def stream_in_fp32(self, section: Any) -> bool:
        """Return whether `residual_in_fp32` is set."""
        return section.residual_in_fp32

    def forward_channels(self, section: Any) -> int:
        """Count the numbers of a token in a layer: two of the stream and eight inside it."""
        states = 2 * section.state_size * section.hidden_size
        return 2 * section.hidden_size + 8 * inner_size(section) + states // EVERY

    def state_bytes(self, section: Any, length: int, itemsize: int) -> int:
        """Count the states, in fp32 at least, and the convolutions' last W−1 inputs."""
        inputs = (section.conv_kernel - 1) * self.convolved_channels(section)
        state = self.state_numbers(section) * max(4, itemsize)
        return section.num_hidden_layers * (state + inputs * itemsize)

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
        from cat_lm.model.short_convolution import describe_backend

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
    scan_flops = 27

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

    def _rates(self, section: MambaSection) -> int:
        return inner_size(section)

    def _rank(self, section: MambaSection) -> int:
        auto = section.time_step_rank == "auto"
        return usual_rank(section.hidden_size) if auto else section.time_step_rank

    def convolved_channels(self, section: MambaSection) -> int:
        """Count the inner channels."""
        return inner_size(section)

    def read_channels(self, section: MambaSection) -> int:
        """Count the scan's input and the gate."""
        return 2 * inner_size(section)

    def layer_matrices(self, section: MambaSection) -> int:
        """Count the projections to steps and states, and to every channel's step."""
        return 2 * inner_size(section) * (self._rank(section) + section.state_size)

    def layer_rates(self, section: MambaSection) -> int:
        """Count the decays, and for each channel the step's bias and D."""
        return inner_size(section) * (section.state_size + 2)

    def saved_tensors(self, section: MambaSection) -> float:
        """Count what autograd keeps of a layer, in tensors of [B, T, C].

        The norm's input and output and what its weight makes; eleven of width I: what the first
        projection makes (2), the convolution's input, SiLU's and the scan's, Δ before and after its
        softplus, Δ x, y, the gate's activation, and what the last projection reads; the low rank
        with B and C; and the scan's states.
        """
        read = (self._rank(section) + 2 * section.state_size) / section.hidden_size
        return 3 + 11 * section.expand + read + self.kept_states(section)

    def saved_in_fp32(self, section: MambaSection) -> float:
        """Count what the norm keeps, Δ twice, Δ x, B, C and the states."""
        read = 2 * section.state_size / section.hidden_size
        return 2 + 3 * section.expand + read + self.kept_states(section)


ENTRY = Mamba()
