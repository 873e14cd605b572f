"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored."""

from __future__ import annotations

from cat_lm.architectures.families.gla import LinearArchitecture
from cat_lm.model.hf.sections.recurrent import DeltaNetSection

ENTRY = LinearArchitecture("delta_net", "DeltaNet", "DeltaNet", "DeltaNet", DeltaNetSection)
