"""Keys of what a transformer's block may have beside attention and its convolutions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cat_lm import limits
from cat_lm.architectures.base import ModelSection
from cat_lm.config_sections import whole


class CanonKeys(ModelSection):
    """Canon layers of the block, see `cat_lm.model.canon`."""

    canon: str = Field("none", description="some of the places A, C and D, as in ACD; or none")
    canon_window: Annotated[int, whole(limits.WINDOW)] = 4
    canon_init: Literal["uniform", "zero"] = "uniform"
