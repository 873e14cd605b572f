"""DeltaNet (Yang et al., 2024): linear attention that replaces what a key has stored."""

from __future__ import annotations

from typing import ClassVar

from cat_lm.architectures.linear import LinearArchitecture
from cat_lm.model.hf.sections.recurrent import DeltaNetSection


class DeltaNet(LinearArchitecture):
    """The delta rule of unit queries and keys, after short convolutions."""

    name = "delta_net"
    title = "DeltaNet"
    model_type = "cat_delta_net"
    library_type = "delta_net"
    class_prefix, library_prefix = "CatDeltaNet", "DeltaNet"
    Section = DeltaNetSection
    short_names: ClassVar[dict[str, str]] = {"": "delta_net"}


ENTRY = DeltaNet()
