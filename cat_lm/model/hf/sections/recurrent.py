"""The keys of recurrent models: GLA and DeltaNets, both Mambas, and any mixer of `cat_lm.mixers`.

Names are those of flash-linear-attention, of transformers, and of `CatMixerConfig`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from cat_lm.core import numbers
from cat_lm.core.fields import entry_of, number, whole
from cat_lm.mixers import MIXERS, mixer_of, mixer_problems
from cat_lm.model.hf.sections.base import (
    GATED_WIDTH,
    Epsilon,
    GatedWidth,
    Heads,
    InnerWidth,
    ModelSection,
    Width,
    Window,
    field,
)

_Expansion = Annotated[float, number(numbers.EXPANSION)]
_Multiple = Annotated[int, whole(numbers.EXPANSION.at_least(1))]
_Rows = Annotated[int, whole(numbers.CONTEXT)]
_StateSize = Annotated[int, whole(numbers.STATE_SIZE)]

# flash-linear-attention's


def exact(factor: float) -> Fraction:
    """Return the exact fraction that a decimal such as 0.3 or 0.3333333 stands for."""
    return Fraction(factor).limit_denominator(4096)


class LinearSection(GatedWidth, ModelSection):
    """The keys of all three; with `gated_output` SiLU of a projection multiplies the output."""

    gated_output: ClassVar[bool] = True

    num_heads: Heads = field(..., "heads")
    conv_size: Window = field(4, "W of the short convolutions of q, k and v")
    intermediate_size: InnerWidth | None = field(None, GATED_WIDTH)
    norm_eps: Epsilon = field(1e-6, "added to mean squares in RMS norms")
    initializer_range: Epsilon = field(0.02, "standard deviation of first weights")
    conv_init: Literal["normal", "uniform"] = field(
        "normal", "start of filters: std initializer_range, or ±1/sqrt(W)"
    )

    @property
    def key_channels(self) -> int:
        return int(self.hidden_size * exact(self.expand_k))

    @property
    def value_channels(self) -> int:
        return int(self.hidden_size * exact(self.expand_v))

    @property
    def window(self) -> int:
        """Return W of the short convolutions of q, k and v; 0 without them."""
        return self.conv_size

    def shape_problems(self) -> list[str]:
        found, width = [], self.hidden_size
        for key in ("expand_k", "expand_v"):
            times = exact(getattr(self, key))
            channels = width * times
            if channels.denominator != 1 or channels < 1:
                found.append(
                    f"{key}={float(times):g}: hidden_size={width} times it is "
                    f"{float(channels):g} channels; must be a whole number"
                )
            elif channels % self.num_heads:
                found.append(
                    f"num_heads={self.num_heads}: must divide {channels} channels "
                    f"({key}={float(times):g} x hidden_size={width})"
                )
        return found

    @property
    def windows(self) -> dict[str, int]:
        return {"conv_size": self.window}

    @property
    def divided_counts(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}


class GlaSection(LinearSection):
    """Shape of the model, in the names of flash-linear-attention's GLAConfig."""

    architecture: Literal["gla"] = "gla"
    num_heads: Heads = field(4, "heads")
    expand_k: _Expansion = field(0.5, "channels of all keys over hidden_size")
    expand_v: _Expansion = field(1.0, "channels of all values over hidden_size")
    use_short_conv: bool = field(False, "convolve q, k and v")

    @property
    def window(self) -> int:
        """Return W of the short convolutions; 0 without `use_short_conv`."""
        return self.conv_size if self.use_short_conv else 0

    def shape_problems(self) -> list[str]:
        found = super().shape_problems()
        # 4 is flash-linear-attention's default.
        if not self.use_short_conv and self.conv_size != 4:
            found.append(f"conv_size={self.conv_size}: has no effect without use_short_conv")
        return found


class DeltaNetSection(LinearSection):
    """Shape of the model, in the names of flash-linear-attention's DeltaNetConfig."""

    gated_output: ClassVar[bool] = False
    architecture: Literal["delta_net"] = "delta_net"
    expand_k: _Expansion = field(1.0, "channels of all keys over hidden_size")
    expand_v: _Expansion = field(1.0, "channels of all values over hidden_size")


class GatedDeltaNetSection(LinearSection):
    """Shape of the model, in the names of flash-linear-attention's GatedDeltaNetConfig."""

    architecture: Literal["gated_deltanet"] = "gated_deltanet"
    head_dim: Width | None = field(None, "of keys; default: 3/4 x hidden_size / num_heads")
    expand_v: _Expansion = field(2.0, "channels of a head's values over head_dim")

    @property
    def head_channels(self) -> int:
        """Count the channels of a head's keys: by default three quarters of the width, shared."""
        return self.head_dim or 3 * self.hidden_size // (4 * self.num_heads)

    @property
    def key_channels(self) -> int:
        return self.num_heads * self.head_channels

    @property
    def value_channels(self) -> int:
        return self.num_heads * int(self.head_channels * exact(self.expand_v))

    def shape_problems(self) -> list[str]:
        width, heads = self.hidden_size, self.num_heads
        if self.head_dim is None and 3 * width % (4 * heads):
            return [
                f"num_heads={heads}: three quarters of hidden_size={width} do not divide among "
                "them; give head_dim"
            ]
        values = self.head_channels * exact(self.expand_v)
        if values.denominator == 1 and values >= 1:
            return []
        return [
            f"expand_v={self.expand_v:g}: a head's {self.head_channels} channels times it are "
            f"{float(values):g}; must be a whole number"
        ]

    def derived(self) -> dict[str, Any]:
        return super().derived() | {"head_dim": self.head_channels}


# Mamba's

_Start = Annotated[float, number(numbers.TIME_STEP)]


class StateSpaceSection(ModelSection):
    """The keys of both Mambas, in the names of `transformers`' configurations."""

    state_size: _StateSize = field(16, "numbers of the state a channel")
    conv_kernel: Window = field(4, "taps of the short convolution")
    expand: _Multiple = field(2, "channels inside a layer over hidden_size")
    use_bias: bool = field(False, "of the first and the last projection of a layer")
    use_conv_bias: bool = field(True, "a bias in the short convolution")
    layer_norm_epsilon: Epsilon = field(1e-5, "added to mean squares in RMS norms")
    residual_in_fp32: bool = field(True, "the residual stream in bf16 training")
    initializer_range: Epsilon = field(0.02, "standard deviation of first weights")
    rescale_prenorm_residual: bool = field(False, "divide output projections by sqrt(layers)")
    time_step_min: _Start = field(0.001, "least step size that a layer starts from")
    time_step_max: _Start = field(0.1, "largest step size that a layer starts from")
    time_step_floor: _Start = field(1e-4, "smaller first step sizes are raised to it")

    @property
    def inner_size(self) -> int:
        return self.expand * self.hidden_size

    @property
    def convolved_channels(self) -> int:
        return self.inner_size

    def shape_problems(self) -> list[str]:
        low, high = self.time_step_min, self.time_step_max
        if low <= high:
            return []
        return [f"time_step_min={low:g}: must be at most time_step_max={high:g}"]

    @property
    def windows(self) -> dict[str, int]:
        return {"conv_kernel": self.conv_kernel}

    @property
    def divided_counts(self) -> dict[str, int]:
        return {"expand x hidden_size": self.inner_size}


def usual_rank(hidden_size: int) -> int:
    """Return the rank of Mamba's step sizes for `auto`."""
    return math.ceil(hidden_size / 16)


def _auto_or_rank(value: Any) -> Any:
    if value == "auto":
        return value
    with contextlib.suppress(ValueError):
        rank = numbers.check_whole(value, numbers.HIDDEN_SIZE)
        if type(rank) is int:
            return rank
    raise ValueError(f"must be auto, or a whole number from 1 to {numbers.HIDDEN_SIZE.high:,}")


_Rank = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_rank)]


class MambaSection(StateSpaceSection):
    """Shape of the model, in the names of `transformers`' Mamba and CatMambaConfig."""

    architecture: Literal["mamba"] = "mamba"
    time_step_rank: _Rank = field("auto", "auto: hidden_size / 16, rounded up")


NO_LIMIT = (0.0, math.inf)
_Bound = Annotated[float, number(numbers.Range(*NO_LIMIT))]


def _pair(value: Any) -> Any:
    """Check a pair of bounds; transformers writes infinity, which JSON lacks, as an object."""
    if value is None:
        return value
    pair = value if isinstance(value, list | tuple) else ()
    pair = tuple(math.inf if n == {"__float__": "Infinity"} else n for n in pair)
    is_pair = len(pair) == 2 and all(isinstance(n, int | float) for n in pair)
    if not (is_pair and 0 <= pair[0] < pair[1]):
        raise ValueError("must be two numbers from 0 up, the lower one first")
    return pair


_Limits = Annotated[tuple[_Bound, _Bound] | None, BeforeValidator(_pair)]


class Mamba2Section(StateSpaceSection):
    """Shape of the model, in the names of `transformers`' Mamba-2 and CatMamba2Config."""

    architecture: Literal["mamba2"] = "mamba2"
    state_size: _StateSize = field(128, "numbers of the state a channel")
    head_dim: Width = field(64, "channels of a head")
    num_heads: Heads | None = field(None, "default: expand x hidden_size / head_dim")
    n_groups: Heads = field(1, "groups of heads that share keys and queries")
    time_step_limit: _Limits = field(None, "bounds of every step size; default: none")

    @property
    def heads(self) -> int:
        return self.num_heads or max(1, self.inner_size // self.head_dim)

    @property
    def convolved_channels(self) -> int:
        return self.inner_size + 2 * self.n_groups * self.state_size

    def shape_problems(self) -> list[str]:
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
        return {"num_heads": self.heads}

    def derived(self) -> dict[str, Any]:
        return {"num_heads": self.heads, "time_step_limit": self.time_step_limit or NO_LIMIT}


# Of any mixer


class MixerSection(GatedWidth, ModelSection):
    """Shape of the model and its mixer, in the names of CatMixerConfig."""

    architecture: Literal["mixer"] = "mixer"
    mixer: Annotated[str, entry_of(MIXERS)] = field(..., "by its name in cat_lm/mixers")
    mixer_options: dict[str, Any] = field({}, "as {heads: 4, window: 3}; see cat_lm/mixers")
    intermediate_size: InnerWidth | None = field(None, GATED_WIDTH)
    learned_positions: _Rows | None = field(None, "rows of the mixer's table of positions, if any")
    rms_norm_eps: Epsilon = field(1e-6, "added to mean squares in RMS norms")
    initializer_range: Epsilon = field(0.02, "standard deviation of first weights")

    @property
    def isolates_documents(self) -> bool:
        return "documents" in mixer_of(self).kind.supports

    def derived(self) -> dict[str, Any]:
        return super().derived() | {"mixer_options": asdict(mixer_of(self).options)}

    def shape_problems(self) -> list[str]:
        return mixer_problems(self)
