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
from cat_lm.model.recurrent_rules import exact
from cat_lm.model.rules import gated_width, tap_problems

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
    """A family whose section is a `LinearSection` and a `cat_lm.model.recurrent_rules.LinearShape`.

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
        """Return what does not go together, see `cat_lm.model.recurrent_rules`."""
        windows = {"conv_size": section.window}
        return [*section.shape_problems(), *tap_problems(windows, context_length)]

    def division_problems(self, section: Any, parts: int, context_length: int) -> list[str]:
        """Return whether heads, or parts shorter than filters, cannot be shared."""
        return [
            *head_division_problems(parts, {"num_heads": section.num_heads}),
            *halo_problems(parts, context_length, {"conv_size": section.window}),
        ]

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
        from cat_lm.model.streams.short_convolution import describe_backend

        channels = (config.key_channels, config.value_channels)
        return describe_backend(config.window, channels, device, dtype, backend)

    def describe_mixer_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the recurrence; as in the base."""
        from cat_lm.ops.recurrence.backends import describe_backend

        mixer = self.classes().base_model.mixer
        return describe_backend(mixer.recurrence, device, dtype, backend)
