"""GLA (Yang et al., 2023), and what it shares with both DeltaNets: a block, a library's names."""

from __future__ import annotations

from typing import Any

from cat_lm.architectures.base import Architecture, Classes, Summary, sizes_of
from cat_lm.model.hf.sections.recurrent import GlaSection, LinearSection, exact


class LinearArchitecture(Architecture):
    """The base of flash-linear-attention's families: short convolutions, a recurrence and a gated
    MLP.

    Args:
        name: the name of the model in flash-linear-attention.
        title, library_prefix, Section: as of `Architecture`.
        class_prefix: the prefix of the class names, after `Cat`.
    """

    library = "flash-linear-attention"
    library_import = "fla"
    layer_weight = "model.layers.{layer}.mlp.down_proj.weight"
    recurrent = True
    # These keys only affect the initialization.
    free_keys = frozenset({"initializer_range", "conv_init"})
    adapter_modules = ("q_proj", "v_proj")

    def __init__(
        self,
        name: str,
        title: str,
        class_prefix: str,
        library_prefix: str,
        section: type[LinearSection],
    ) -> None:
        self.name, self.title, self.Section = name, title, section
        self.model_type, self.library_type = f"cat_{name}", name
        self.class_prefix, self.library_prefix = f"Cat{class_prefix}", library_prefix
        self.short_names = {"": name}

    def library_classes(self) -> Classes:
        """Import the classes that write flash-linear-attention's format: its types and fields, our
        code.
        """
        from cat_lm.model.hf import modeling_recurrent as models

        causal_lm = getattr(models, f"{self.library_prefix}ForCausalLM")
        return Classes(causal_lm.config_class, causal_lm)

    def library_problems(self, config: Any) -> list[str]:
        """Return the widths for which the package, which truncates products, would have fewer
        channels.
        """
        width = getattr(config, "head_dim", config.hidden_size)
        return [
            f"has {key}={factor!r}, of which flash-linear-attention makes "
            f"{int(width * factor)} channels and not {width * exact(factor)}"
            for key in ("expand_k", "expand_v")
            if (factor := getattr(config, key, None))
            and int(width * factor) != width * exact(factor)
        ]

    def summary(self, section: Any) -> Summary:
        keys = section.key_channels // section.num_heads
        values = section.value_channels // section.num_heads
        short = f"W={section.window}" if section.window else "no short convolution"
        words = f"states of {keys} x {values} a head, {short}"
        sizes = sizes_of(section, heads=section.num_heads)
        return Summary(self.title, words, {"conv_window": section.window or None}, sizes)

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        return {"num_heads": heads} if self.Section.model_fields["num_heads"].is_required() else {}

    def describe_backend(self, key: str, config: Any, *how: Any) -> str:
        if key == "mixer_backend":
            from cat_lm.ops.recurrence.backends import describe_backend

            return describe_backend(self.classes().base_model.mixer.recurrence, *how)
        shape = config.section
        if not shape.window:
            return super().describe_backend(key, config, *how)
        from cat_lm.model.hf.inspection import describe_convolutions

        widths = shape.key_channels, shape.value_channels
        parts = [("depthwise", "short", shape.window, 1, width) for width in widths]
        return "; ".join(describe_convolutions(parts, *how))


ENTRY = LinearArchitecture("gla", "GLA", "Gla", "GLA", GlaSection)
