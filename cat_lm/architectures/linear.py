"""What GLA, DeltaNet and Gated DeltaNet have in common: the block and names of their library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

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
from cat_lm.model.linear_rules import exact
from cat_lm.model.rules import gated_width, tap_problems
from cat_lm.ops.recurrence import GLA_LOW_RANK

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


class LinearSection(ModelSection):
    """What all three have, in the names of flash-linear-attention's configurations."""

    num_heads: Annotated[int, whole(numbers.HEADS)] = Field(description="heads")
    conv_size: Annotated[int, whole(numbers.WINDOW)] = Field(
        4, description="W of the short convolutions of q, k and v"
    )
    intermediate_size: Annotated[int, whole(numbers.INTERMEDIATE_SIZE)] | None = Field(
        None, description="default: 8/3 x hidden_size, up to a multiple of 256"
    )
    norm_eps: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-6, description="added to mean squares in RMS norms"
    )
    initializer_range: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        0.02, description="standard deviation of first weights"
    )
    conv_init: Literal["normal", "uniform"] = Field(
        "normal",
        description="start of the short convolutions: std initializer_range, or within ±1/sqrt(W)",
    )

    @property
    def inner_size(self) -> int:
        """The width of the MLP."""
        return self.intermediate_size or gated_width(self.hidden_size)


class LinearArchitecture(Architecture):
    """A family whose section is a `LinearSection` and a `cat_lm.model.linear_rules.LinearShape`.

    Attributes:
        classes_named: the beginning of this project's classes' names; those of
            flash-linear-attention begin with `package_classes`.
    """

    library = "flash-linear-attention"
    library_import = "fla"
    embedding = "model.embeddings.weight"
    layer_weight = "model.layers.{layer}.mlp.down_proj.weight"
    recurrent = True
    free_keys = frozenset({"initializer_range", "conv_init"})  # of the start alone
    adapter_modules = ("q_proj", "v_proj")
    classes_named: ClassVar[str]
    package_classes: ClassVar[str]

    def config_class(self) -> type[PreTrainedConfig]:
        """Import this project's configuration."""
        from cat_lm.model.hf import configuration_linear

        return getattr(configuration_linear, f"{self.classes_named}Config")

    def classes(self) -> Classes:
        """Import this project's classes."""
        from cat_lm.model.hf import modeling_linear as models

        named = self.classes_named
        causal_lm, body = (getattr(models, f"{named}{end}") for end in ("ForCausalLM", "Model"))
        return Classes(self.config_class(), causal_lm, body)

    def library_classes(self) -> Classes:
        """Import what writes flash-linear-attention's models: their types and fields, our code."""
        from cat_lm.model.hf import modeling_linear as models

        causal_lm = getattr(models, f"{self.package_classes}ForCausalLM")
        return Classes(causal_lm.config_class, causal_lm)

    # Sections and configurations

    def fields(self, section: Any, vocab_size: int, context_length: int) -> dict[str, Any]:
        """Return the arguments of the configuration's class."""
        fields = super().fields(section, vocab_size, context_length)
        return fields | {"intermediate_size": section.inner_size}

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json. Raises ValueError."""
        from cat_lm.model.hf.configuration_linear import check_settings

        check_settings(self.config_class(), settings)

    def library_problems(self, config: PreTrainedConfig) -> list[str]:
        """Return where the package, which truncates products, would make fewer channels."""
        width = getattr(config, "head_dim", config.hidden_size)
        return [
            f"has {key}={factor!r}, of which flash-linear-attention makes "
            f"{int(width * factor)} channels and not {width * exact(factor)}"
            for key in ("expand_k", "expand_v")
            if (factor := getattr(config, key, None))
            and int(width * factor) != width * exact(factor)
        ]

    def problems(self, section: Any, context_length: int) -> list[str]:
        """Return what does not go together, see `cat_lm.model.linear_rules`."""
        windows = {"conv_size": section.window}
        return [*section.shape_problems(), *tap_problems(windows, context_length)]

    def division_problems(self, section: Any, parts: int, context_length: int) -> list[str]:
        """Return whether heads, or parts shorter than filters, cannot be shared."""
        return [
            *head_division_problems(parts, {"num_heads": section.num_heads}),
            *halo_problems(parts, context_length, {"conv_size": section.window}),
        ]

    def exchanged_numbers(self, section: Any, parts: int) -> float:
        """Count queries, keys, their decays, and values there and back; rates of heads are few."""
        keys = 3 if section.decays == "keys" else 2
        numbers = keys * section.key_channels + 2 * section.value_channels
        return numbers * (parts - 1) / parts

    # Counts

    def convolved_channels(self, section: Any) -> int:
        """Count the channels of a layer that have a filter."""
        read = 2 * section.key_channels + section.value_channels
        return read if section.window else 0

    def state_numbers(self, section: Any) -> int:
        """Count the numbers of a layer's state, which is in fp32."""
        return section.key_channels * section.value_channels // section.num_heads

    def num_parameters(self, section: Any, vocab_size: int) -> int:
        """Count the parameters."""
        width, keys, values = section.hidden_size, section.key_channels, section.value_channels
        mixer = 2 * keys + (3 if section.gated_output else 2) * values
        if section.decays == "keys":
            mixer += GLA_LOW_RANK
        else:
            mixer += section.num_heads * (2 if section.decays else 1)
        layer = width * (mixer + 2 + 3 * section.inner_size)
        layer += GLA_LOW_RANK * keys if section.decays == "keys" else 0
        tables = 1 if section.tie_word_embeddings else 2
        return (
            section.num_hidden_layers * layer
            + self.elementwise_parameters(section)
            + width
            + tables * (section.vocab_size or vocab_size) * width
        )

    def elementwise_parameters(self, section: Any) -> int:
        """Count filters, rates with their biases, and the weights of the heads' norms."""
        own = section.window * self.convolved_channels(section)
        own += section.value_channels // section.num_heads
        rates = {"keys": section.key_channels, "heads": 2 * section.num_heads, "": 0}
        return section.num_hidden_layers * (own + rates[section.decays])

    def mixing_flops(self, section: Any, context_length: int) -> float:
        """Count a token's FLOPs of recurrences and short convolutions, forward and backward."""
        own = section.each * self.state_numbers(section)
        own += convolution_flops(section.window, self.convolved_channels(section))
        return section.num_hidden_layers * own

    def saved_tensors(self, section: Any) -> float:
        """Count what autograd keeps of a layer, in tensors of [B, T, C].

        The mixer's, the inputs of two norms, normed (which their weights multiply) and as they
        leave, and the MLP's four of width I: the gate before and after its activation, what it
        multiplies, and the product.
        """
        numbers = self.mixer_numbers(section) + self.recurrence_numbers(section)
        return 6 + (numbers + 4 * section.inner_size) / section.hidden_size

    def saved_in_fp32(self, section: Any) -> float:
        """Count what the recurrence keeps."""
        return self.recurrence_numbers(section) / section.hidden_size

    def mixer_numbers(self, section: Any) -> float:
        """Count a token's numbers that a mixer keeps around its recurrence."""
        raise NotImplementedError

    def recurrence_numbers(self, section: Any) -> float:
        """Count a token's numbers that the recurrence keeps."""
        raise NotImplementedError

    def forward_channels(self, section: Any) -> int:
        """Count the numbers of a token in a layer, as a forward pass holds them at once."""
        keys, values = section.key_channels, section.value_channels
        mixer = int(self.recurrence_numbers(section)) + 2 * (keys + values)
        return 3 * section.hidden_size + max(mixer, 3 * section.inner_size)

    def state_bytes(self, section: Any, length: int, itemsize: int) -> int:
        """Count the states, in fp32 at least, and the convolutions' last W−1 inputs."""
        inputs = max(0, section.window - 1) * self.convolved_channels(section)
        state = self.state_numbers(section) * max(4, itemsize)
        return section.num_hidden_layers * (state + inputs * itemsize)

    # Words

    def words(self, section: Any) -> str:
        """Name the heads and the short convolutions."""
        keys, values = (
            channels // section.num_heads
            for channels in (section.key_channels, section.value_channels)
        )
        short = f"W={section.window}" if section.window else "no short convolution"
        return f"states of {keys} x {values} a head, {short}"

    def facts(self, section: Any) -> dict[str, Any]:
        """Return the window of the short convolutions."""
        return {"conv_window": section.window or None}

    def sizes(self, section: Any) -> dict[str, int]:
        """Return layers, width and heads."""
        return super().sizes(section) | {"heads": section.num_heads}

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return the heads."""
        return {"num_heads": heads}

    # Backends

    def describe_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the short convolutions; as in the base."""
        if not config.window:
            return super().describe_backend(config, device, dtype, backend)
        from cat_lm.model.short_convolution import describe_backend

        channels = (config.key_channels, config.value_channels)
        return describe_backend(config.window, channels, device, dtype, backend)

    def describe_mixer_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the recurrence; as in the base."""
        from cat_lm.ops.recurrence.backends import describe_backend

        mixer = self.classes().base_model.mixer
        return describe_backend(mixer.recurrence, device, dtype, backend)
