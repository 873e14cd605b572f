"""Gated DeltaNet (Yang et al., 2024): the delta rule on a state that decays."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cat_lm.architectures.families.delta_net import DeltaNet
from cat_lm.architectures.linear import LinearSection
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model.recurrent_rules import GatedDeltaNetShape


class GatedDeltaNetSection(GatedDeltaNetShape, LinearSection):
    """Shape of the model, in the names of flash-linear-attention's GatedDeltaNetConfig."""

    architecture: Literal["gated_deltanet"] = "gated_deltanet"
    head_dim: Annotated[int, whole(numbers.HIDDEN_SIZE)] | None = Field(
        None, description="of keys; default: 3/4 x hidden_size / num_heads"
    )
    expand_v: Annotated[float, number(numbers.EXPANSION)] = Field(
        2.0, description="channels of a head's values over head_dim"
    )


class GatedDeltaNet(DeltaNet):
    """The delta rule on a state that decays; its output is gated."""

    name = "gated_deltanet"
    title = "Gated DeltaNet"
    model_type = "cat_gated_deltanet"
    library_type = "gated_deltanet"
    short_names: ClassVar[dict[str, str]] = {"": "gated_deltanet"}
    classes_named = "CatGatedDeltaNet"
    package_classes = "GatedDeltaNet"
    Section = GatedDeltaNetSection

    def fields(
        self, section: GatedDeltaNetSection, vocab_size: int, context_length: int
    ) -> dict[str, Any]:
        """Return the arguments of the configuration's class."""
        fields = super().fields(section, vocab_size, context_length)
        return fields | {"head_dim": section.head_channels}


ENTRY = GatedDeltaNet()
