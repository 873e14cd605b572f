"""The keys of Mamba and Mamba-2, in the names of transformers' configurations."""

from __future__ import annotations

import contextlib
import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model.hf.sections.base import ModelSection

_Start = Annotated[float, number(numbers.TIME_STEP)]


class StateSpaceSection(ModelSection):
    """What both Mambas have, in the names of `transformers`' configurations."""

    state_size: Annotated[int, whole(numbers.STATE_SIZE)] = Field(
        16, description="numbers of the state a channel"
    )
    conv_kernel: Annotated[int, whole(numbers.WINDOW)] = Field(
        4, description="taps of the short convolution"
    )
    expand: Annotated[int, whole(numbers.EXPANSION.at_least(1))] = Field(
        2, description="channels inside a layer over hidden_size"
    )
    use_bias: bool = Field(False, description="of the first and the last projection of a layer")
    use_conv_bias: bool = Field(True, description="a bias in the short convolution")
    layer_norm_epsilon: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-5, description="added to mean squares in RMS norms"
    )
    residual_in_fp32: bool = Field(True, description="the residual stream in bf16 training")
    initializer_range: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        0.02, description="standard deviation of first weights"
    )
    rescale_prenorm_residual: bool = Field(
        False, description="start the last projection of a layer with 1/sqrt(layers) of its size"
    )
    time_step_min: _Start = Field(0.001, description="least step size that a layer starts from")
    time_step_max: _Start = Field(0.1, description="largest step size that a layer starts from")
    time_step_floor: _Start = Field(1e-4, description="smaller first step sizes are raised to it")

    @property
    def inner_size(self) -> int:
        """Return I, the channels inside a layer."""
        return self.expand * self.hidden_size

    @property
    def convolved_channels(self) -> int:
        """Count the channels that a layer's short convolution reads."""
        return self.inner_size

    def shape_problems(self) -> list[str]:
        """Return what does not go together, in lines that begin with the key."""
        low, high = self.time_step_min, self.time_step_max
        return (
            []
            if low <= high
            else [f"time_step_min={low:g}: must be at most time_step_max={high:g}"]
        )

    @property
    def windows(self) -> dict[str, int]:
        """Return the taps of the short convolution."""
        return {"conv_kernel": self.conv_kernel}

    @property
    def divided_counts(self) -> dict[str, int]:
        """Return the inner channels."""
        return {"expand x hidden_size": self.inner_size}


def usual_rank(hidden_size: int) -> int:
    """Return the rank of Mamba's step sizes that `auto` stands for."""
    return math.ceil(hidden_size / 16)


def _auto_or_rank(value: Any) -> Any:
    """Check a rank, which may be auto. Raises ValueError."""
    if value == "auto":
        return value
    with contextlib.suppress(ValueError):
        rank = numbers.check_whole(value, numbers.HIDDEN_SIZE)
        if type(rank) is int:
            return rank
    raise ValueError(f"must be auto, or a whole number from 1 to {numbers.HIDDEN_SIZE.high:,}")


class MambaSection(StateSpaceSection):
    """Shape of the model, in the names of `transformers`' Mamba and CatMambaConfig."""

    architecture: Literal["mamba"] = "mamba"
    time_step_rank: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_rank)] = Field(
        "auto", description="auto: hidden_size / 16, rounded up"
    )


NO_LIMIT = (0.0, math.inf)
_Bound = Annotated[float, number(numbers.Range(*NO_LIMIT))]


def _pair(value: Any) -> Any:
    """Check bounds; JSON has no infinity, which transformers writes as an object."""
    if value is None:
        return value
    pair = value if isinstance(value, list | tuple) else ()
    pair = tuple(math.inf if n == {"__float__": "Infinity"} else n for n in pair)
    is_pair = len(pair) == 2 and all(isinstance(n, int | float) for n in pair)
    if not (is_pair and 0 <= pair[0] < pair[1]):
        raise ValueError("must be two numbers from 0 up, the lower one first")
    return pair


class Mamba2Section(StateSpaceSection):
    """Shape of the model, in the names of `transformers`' Mamba-2 and CatMamba2Config."""

    architecture: Literal["mamba2"] = "mamba2"
    state_size: Annotated[int, whole(numbers.STATE_SIZE)] = Field(
        128, description="numbers of the state a channel"
    )
    head_dim: Annotated[int, whole(numbers.HIDDEN_SIZE)] = Field(
        64, description="channels of a head"
    )
    num_heads: Annotated[int, whole(numbers.HEADS)] | None = Field(
        None, description="default: expand x hidden_size / head_dim"
    )
    n_groups: Annotated[int, whole(numbers.HEADS)] = Field(
        1, description="each with its own keys and queries, for all heads in it"
    )
    time_step_limit: Annotated[tuple[_Bound, _Bound] | None, BeforeValidator(_pair)] = Field(
        None, description="bounds of every step size; default: none"
    )

    @property
    def heads(self) -> int:
        """Count the heads."""
        return self.num_heads or max(1, self.inner_size // self.head_dim)

    @property
    def convolved_channels(self) -> int:
        """Count the inner channels, and those that groups write and read by."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    def shape_problems(self) -> list[str]:
        """Return what does not go together, in lines that begin with the key."""
        found, heads = super().shape_problems(), self.heads
        if heads * self.head_dim != self.inner_size:
            found.append(
                f"head_dim={self.head_dim}: {heads} heads of so many channels are not "
                f"expand x hidden_size = {self.inner_size}"
            )
        elif heads % self.n_groups:
            found.append(f"n_groups={self.n_groups}: must divide the {heads} heads")
        return found

    @property
    def divided_counts(self) -> dict[str, int]:
        """Return the heads."""
        return {"num_heads": self.heads}

    def derived(self) -> dict[str, Any]:
        """Return the heads and the bounds."""
        return {"num_heads": self.heads, "time_step_limit": self.time_step_limit or NO_LIMIT}
