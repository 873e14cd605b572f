"""Mamba: selective state spaces in the place of attention and MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.architectures.base import Architecture, Summary, sizes_of
from cat_lm.model.hf.sections.recurrent import MambaSection, usual_rank


class StateSpace(Architecture):
    """The base of the families whose section is a `StateSpaceSection`; layers are RMSNorm and a
    mixer.
    """

    layer_weight = "backbone.layers.{layer}.mixer.in_proj.weight"
    recurrent = True
    unoffered_keys = ("hidden_act",)
    adapter_modules = ("in_proj", "out_proj")
    # These keys only change the initialization or the rounding.
    free_keys = frozenset(
        {"initializer_range", "rescale_prenorm_residual", "residual_in_fp32"}
        | {"time_step_min", "time_step_max", "time_step_floor"}
    )

    def summary(self, section: Any) -> Summary:
        words = f"{section.state_size} numbers of state a channel, W={section.conv_kernel}"
        facts = {"state_size": section.state_size}
        return Summary(self.title, words, facts, sizes_of(section))

    def describe_backend(self, key: str, config: Any, *how: Any) -> str:
        if key == "mixer_backend":
            from cat_lm.ops.recurrence.backends import SELECTIVE_SCAN, describe_backend

            return describe_backend(SELECTIVE_SCAN, *how)
        from cat_lm.model.hf.inspection import describe_convolutions

        channels = config.section.convolved_channels
        part = "depthwise", "short", config.conv_kernel, 1, channels
        return "; ".join(describe_convolutions([part], *how))


class Mamba(StateSpace):
    """Every channel has its own state, and its own decay rates."""

    name = "mamba"
    title = "Mamba"
    model_type = "cat_mamba"
    library_type = "mamba"
    class_prefix, library_prefix = "CatMamba", "Mamba"
    Section = MambaSection
    short_names: ClassVar[dict[str, str]] = {"": "mamba"}

    def section_values(self, config: Any) -> dict[str, Any]:
        values = super().section_values(config)
        usual = values["time_step_rank"] == usual_rank(values["hidden_size"])
        return values | ({"time_step_rank": "auto"} if usual else {})


ENTRY = Mamba()
