"""Gated DeltaNet (Yang et al., 2024): the delta rule on a state that decays; a gated output."""

from __future__ import annotations

from cat_lm.architectures.families.gla import LinearArchitecture
from cat_lm.model.hf.sections.recurrent import GatedDeltaNetSection

ENTRY = LinearArchitecture(
    "gated_deltanet", "Gated DeltaNet", "GatedDeltaNet", "GatedDeltaNet", GatedDeltaNetSection
)
