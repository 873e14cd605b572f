"""Keys of what a transformer's block may have beside attention and its convolutions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cat_lm.architectures.base import ModelSection
from cat_lm.core import numbers
from cat_lm.core.fields import entry_of, whole
from cat_lm.ops.long_filter import filters


class KernelKeys(ModelSection):
    """What filters are, the kernel of scores that they make, and norms of them, q and k."""

    conv_filter: Annotated[str, entry_of(filters.FILTERS)] = Field(
        "taps", description="or exponential, ssm: as long as the text, for each head"
    )
    conv_state: Annotated[int, whole(numbers.CONV_STATE)] = Field(
        0, description="N, the numbers of state of such a filter"
    )
    conv_rank: Annotated[int, whole(numbers.WINDOW)] = Field(
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
    """Canon layers of the block, see `CanonLayer`."""

    canon: str = Field("none", description="some of the places A, C and D, as in ACD; or none")
    canon_window: Annotated[int, whole(numbers.WINDOW)] = Field(4, description="taps of a filter")
    canon_init: Literal["uniform", "zero"] = Field("uniform", description="start of Canon layers")
