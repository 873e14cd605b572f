"""Sizes of the linear-attention families and what does not go together in them.

One definition for a run's section and for a model's own configuration, whose keys have the same
names: the shapes here stand before both. Imports no torch.
"""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

# What the filters of short convolutions start from.
CONV_INITS = ("normal", "uniform")


class LinearShape:
    """What a layer's mixer is made of, by the keys of a section or a configuration.

    Attributes:
        gated_output: whether its output is multiplied by SiLU of a projection.
        decays: how the state decays: "keys", each key channel by a gate of low rank; "heads", each
            head; or "" for none.
    """

    gated_output: ClassVar[bool] = True
    decays: ClassVar[str] = ""

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
        """Return what does not go together, in lines that begin with the key."""
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

    decays = "keys"

    @property
    def window(self) -> int:
        """Return W of the short convolutions; 0 without `use_short_conv`."""
        return self.conv_size if self.use_short_conv else 0

    def shape_problems(self) -> list[str]:
        """Return what does not go together, in lines that begin with the key."""
        found = super().shape_problems()
        if not self.use_short_conv and self.conv_size != 4:  # flash-linear-attention's default
            found.append(f"conv_size={self.conv_size}: has no effect without use_short_conv")
        return found


class DeltaNetShape(LinearShape):
    """DeltaNet."""

    gated_output = False


class GatedDeltaNetShape(LinearShape):
    """Gated DeltaNet, whose heads have a width of their own."""

    decays = "heads"

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
        """Return what does not go together, in lines that begin with the key."""
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
