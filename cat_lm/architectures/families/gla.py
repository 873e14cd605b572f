"""GLA: gated linear attention (Yang et al., 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.architectures.linear import LinearArchitecture
from cat_lm.model.hf.sections.recurrent import GlaSection


class Gla(LinearArchitecture):
    """Linear attention whose keys decay by gates of low rank; its output is gated."""

    name = "gla"
    title = "GLA"
    model_type = "cat_gla"
    library_type = "gla"
    class_prefix, library_prefix = "CatGla", "GLA"
    Section = GlaSection
    short_names: ClassVar[dict[str, str]] = {"": "gla"}

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return no numbers: the keys are made for four heads."""
        return {}


ENTRY = Gla()
