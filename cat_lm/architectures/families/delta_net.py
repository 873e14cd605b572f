"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cat_lm.architectures.linear import LinearArchitecture, LinearSection
from cat_lm.core import numbers
from cat_lm.core.fields import number
from cat_lm.model.recurrent_rules import DeltaNetShape


class DeltaNetSection(DeltaNetShape, LinearSection):
    """Shape of the model, in the names of flash-linear-attention's DeltaNetConfig."""

    architecture: Literal["delta_net"] = "delta_net"
    expand_k: Annotated[float, number(numbers.EXPANSION)] = Field(
        1.0, description="channels of all keys over hidden_size"
    )
    expand_v: Annotated[float, number(numbers.EXPANSION)] = Field(
        1.0, description="channels of all values over hidden_size"
    )


class DeltaNet(LinearArchitecture):
    """The delta rule of unit queries and keys, after short convolutions."""

    name = "delta_net"
    title = "DeltaNet"
    model_type = "cat_delta_net"
    library_type = "delta_net"
    short_names: ClassVar[dict[str, str]] = {"": "delta_net"}
    classes_named = "CatDeltaNet"
    package_classes = "DeltaNet"
    Section = DeltaNetSection


ENTRY = DeltaNet()
