"""GLA: gated linear attention (Yang et al., 2023)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cat_lm.architectures.linear import LinearArchitecture, LinearSection
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model.recurrent_rules import GlaShape


class GlaSection(GlaShape, LinearSection):
    """Shape of the model, in the names of flash-linear-attention's GLAConfig."""

    architecture: Literal["gla"] = "gla"
    num_heads: Annotated[int, whole(numbers.HEADS)] = Field(4, description="heads")
    expand_k: Annotated[float, number(numbers.EXPANSION)] = Field(
        0.5, description="channels of all keys over hidden_size"
    )
    expand_v: Annotated[float, number(numbers.EXPANSION)] = Field(
        1.0, description="channels of all values over hidden_size"
    )
    use_short_conv: bool = Field(False, description="convolve q, k and v")


class Gla(LinearArchitecture):
    """Linear attention whose keys decay by gates of low rank; its output is gated."""

    name = "gla"
    title = "GLA"
    model_type = "cat_gla"
    library_type = "gla"
    short_names: ClassVar[dict[str, str]] = {"": "gla"}
    classes_named = "CatGla"
    package_classes = "GLA"
    Section = GlaSection

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return no numbers: the keys are made for four heads."""
        return {}


ENTRY = Gla()
