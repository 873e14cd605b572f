"""The keys of GLA, DeltaNet and Gated DeltaNet, in flash-linear-attention's names."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model.hf.sections.base import GatedWidth, ModelSection


def exact(factor: float) -> Fraction:
    """Return the fraction that a decimal such as 0.3 or 0.3333333 stands for."""
    return Fraction(factor).limit_denominator(4096)


class LinearSection(GatedWidth, ModelSection):
    """What all three have.

    Attributes:
        gated_output: whether a mixer's output is multiplied by SiLU of a projection.
    """

    gated_output: ClassVar[bool] = True

    num_heads: Annotated[int, whole(numbers.HEADS)] = Field(description="heads")
    conv_size: Annotated[int, whole(numbers.WINDOW)] = Field(
        4, description="W of the short convolutions of q, k and v"
    )
    intermediate_size: Annotated[int, whole(numbers.INTERMEDIATE_SIZE)] | None = Field(
        None, description="default: 8/3 x hidden_size, up to a multiple of 256"
    )
    norm_eps: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-6, description="added to mean squares in RMS norms"
    )
    initializer_range: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        0.02, description="standard deviation of first weights"
    )
    conv_init: Literal["normal", "uniform"] = Field(
        "normal",
        description="start of the short convolutions: std initializer_range, or within ±1/sqrt(W)",
    )

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

    @property
    def windows(self) -> dict[str, int]:
        """Return the taps of the short convolutions."""
        return {"conv_size": self.window}

    @property
    def divided_counts(self) -> dict[str, int]:
        """Return the heads."""
        return {"num_heads": self.num_heads}


class GlaSection(LinearSection):
    """Shape of the model, in the names of flash-linear-attention's GLAConfig."""

    architecture: Literal["gla"] = "gla"
    num_heads: Annotated[int, whole(numbers.HEADS)] = Field(4, description="heads")
    expand_k: Annotated[float, number(numbers.EXPANSION)] = Field(
        0.5, description="channels of all keys over hidden_size"
    )
    expand_v: Annotated[float, number(numbers.EXPANSION)] = Field(
        1.0, description="channels of all values over hidden_size"
    )
    use_short_conv: bool = Field(False, description="convolve q, k and v")

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


class DeltaNetSection(LinearSection):
    """Shape of the model, in the names of flash-linear-attention's DeltaNetConfig."""

    gated_output: ClassVar[bool] = False
    architecture: Literal["delta_net"] = "delta_net"
    expand_k: Annotated[float, number(numbers.EXPANSION)] = Field(
        1.0, description="channels of all keys over hidden_size"
    )
    expand_v: Annotated[float, number(numbers.EXPANSION)] = Field(
        1.0, description="channels of all values over hidden_size"
    )


class GatedDeltaNetSection(LinearSection):
    """Shape of the model, in the names of flash-linear-attention's GatedDeltaNetConfig."""

    architecture: Literal["gated_deltanet"] = "gated_deltanet"
    head_dim: Annotated[int, whole(numbers.HIDDEN_SIZE)] | None = Field(
        None, description="of keys; default: 3/4 x hidden_size / num_heads"
    )
    expand_v: Annotated[float, number(numbers.EXPANSION)] = Field(
        2.0, description="channels of a head's values over head_dim"
    )

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

    def derived(self) -> dict[str, Any]:
        """Return the widths of the MLP and of a head."""
        return super().derived() | {"head_dim": self.head_channels}
