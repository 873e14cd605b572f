"""Gated DeltaNet (Yang et al., 2024): the delta rule on a state that decays."""

from __future__ import annotations

from typing import ClassVar

from cat_lm.architectures.linear import LinearArchitecture
from cat_lm.model.hf.sections.recurrent import GatedDeltaNetSection


class GatedDeltaNet(LinearArchitecture):
    """The delta rule on a state that decays; its output is gated."""

    name = "gated_deltanet"
    title = "Gated DeltaNet"
    model_type = "cat_gated_deltanet"
    library_type = "gated_deltanet"
    class_prefix, library_prefix = "CatGatedDeltaNet", "GatedDeltaNet"
    Section = GatedDeltaNetSection
    short_names: ClassVar[dict[str, str]] = {"": "gated_deltanet"}


ENTRY = GatedDeltaNet()
