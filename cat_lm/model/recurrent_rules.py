"""Sizes of the recurrent families, and what does not go together in them.

One definition for a run's section and for a model's own configuration, which have keys of the same
names; problems are lines that begin with the key. Imports no torch.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, ClassVar

# What the filters of short convolutions start from.
CONV_INITS = ("normal", "uniform")


class LinearShape:
    """What a layer's mixer is made of, by the keys of a section or a configuration.

    Attributes:
        gated_output: whether its output is multiplied by SiLU of a projection.
    """

    gated_output: ClassVar[bool] = True

    @property
    def key_channels(self) -> int:
        """Count the channels of all keys."""
        return int(self.hidden_size * exact(self.expand_k))

    @property
    def value_channels(self) -> int:
        """Count the channels of all values."""
        return int(self.hidden_size * exact(self.expand_v))

    @property
    def window(self) -> int:
        """Return W of the short convolutions of q, k and v; 0 without them."""
        return self.conv_size

    def shape_problems(self) -> list[str]:
        """Return what does not go together."""
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


class GlaShape(LinearShape):
    """Gated linear attention."""

    @property
    def window(self) -> int:
        """Return W of the short convolutions; 0 without `use_short_conv`."""
        return self.conv_size if self.use_short_conv else 0

    def shape_problems(self) -> list[str]:
        """Return what does not go together."""
        found = super().shape_problems()
        if not self.use_short_conv and self.conv_size != 4:  # flash-linear-attention's default
            found.append(f"conv_size={self.conv_size}: has no effect without use_short_conv")
        return found


class DeltaNetShape(LinearShape):
    """DeltaNet."""

    gated_output = False


class GatedDeltaNetShape(LinearShape):
    """Gated DeltaNet, whose heads have a width of their own."""

    @property
    def head_channels(self) -> int:
        """Count the channels of a head's keys: by default three quarters of the width, shared."""
        return self.head_dim or 3 * self.hidden_size // (4 * self.num_heads)

    @property
    def key_channels(self) -> int:
        """Count the channels of all keys."""
        return self.num_heads * self.head_channels

    @property
    def value_channels(self) -> int:
        """Count the channels of all values."""
        return self.num_heads * int(self.head_channels * exact(self.expand_v))

    def shape_problems(self) -> list[str]:
        """Return what does not go together."""
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


def exact(factor: float) -> Fraction:
    """Return the fraction that a decimal such as 0.3 or 0.3333333 stands for."""
    return Fraction(factor).limit_denominator(4096)


# Mamba and Mamba-2


def inner_size(model: Any) -> int:
    """Return I, the channels inside a layer; `model` is a section or configuration."""
    return model.expand * model.hidden_size


def usual_rank(hidden_size: int) -> int:
    """Return the rank of Mamba's step sizes that `auto` stands for."""
    return math.ceil(hidden_size / 16)


def step_problems(model: Any) -> list[str]:
    """Return whether the step sizes at the start are a range."""
    low, high = model.time_step_min, model.time_step_max
    return [] if low <= high else [f"time_step_min={low:g}: must be at most time_step_max={high:g}"]


def limit_problems(model: Any) -> list[str]:
    """Return whether Mamba-2's bounds of all step sizes are a range."""
    limit = model.time_step_limit
    are_two = isinstance(limit, list | tuple) and len(limit) == 2
    if limit is None or (
        are_two and all(type(n) in (int, float) for n in limit) and 0 <= limit[0] < limit[1]
    ):
        return []
    return [f"time_step_limit={limit!r}: must be two numbers from 0 up, the lower one first"]


def state_head_problems(model: Any, heads: int) -> list[str]:
    """Return whether Mamba-2's heads fill the inner channels and divide among its groups."""
    inner = inner_size(model)
    if heads * model.head_dim != inner:
        return [
            f"head_dim={model.head_dim}: {heads} heads of so many channels are not "
            f"expand x hidden_size = {inner}"
        ]
    if heads % model.n_groups:
        return [f"n_groups={model.n_groups}: must divide the {heads} heads"]
    return []
