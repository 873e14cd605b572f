"""Keys of what a transformer's block may have beside attention and its convolutions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cat_lm import limits
from cat_lm.architectures.base import ModelSection
from cat_lm.config_sections import whole


class KernelKeys(ModelSection):
    """The rank of the kernel of scores, and norms of filters, queries and keys."""

    conv_rank: Annotated[int, whole(limits.WINDOW)] = Field(
        1, description="of the scores' kernel that filters of q and k make, one for each head"
    )
    conv_norm: Literal["none", "l1"] = Field(
        "none", description="l1 divides a filter by its magnitudes' sum"
    )
    qk_norm: Literal["none", "l2", "rms"] = Field("none", description="of queries and keys")
    qk_norm_place: Literal["after", "before"] = Field(
        "after", description="of the convolution; always before the rotation"
    )


class CanonKeys(ModelSection):
    """Canon layers of the block, see `cat_lm.model.canon`."""

    canon: str = Field("none", description="some of the places A, C and D, as in ACD; or none")
    canon_window: Annotated[int, whole(limits.WINDOW)] = 4
    canon_init: Literal["uniform", "zero"] = "uniform"
