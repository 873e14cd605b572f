"""Kinds of causal convolution along time: the one table of them.

Everything that depends on a kind (shapes of filters, starts, FLOPs, choices of commands, words in
logs) asks its row here. A kind of one's own is a `Kind` given to `register`; without a kernel of a
faster backend the reference computes it, and the log says so. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


# The streams of a block that may be convolved: queries, keys and values.
STREAMS = "qkv"


@dataclass(frozen=True)
class Kind:
    """A kind of convolution of x [B, T, H, D] with filters of W taps, lag 0 first.

    Attributes:
        name: the value of `conv_type`.
        filter_axes: the filters' dimensions, of "W", "H" (heads), "I" (the heads read from) and
            "D" (channels of a head).
        add_lag: the reference: (taps, lag, x delayed by it) to that lag's part of the sum.
        meaning: what a filter belongs to, as in "one filter for each head".
        takes_long_filters: whether `conv_filter` may be one of `cat_lm.ops.long_filter`, which
            are of heads.
    """

    name: str
    filter_axes: tuple[str, ...]
    add_lag: Callable[[Tensor, int, Tensor], Tensor]
    meaning: str
    takes_long_filters: bool = False

    @property
    def mixes_heads(self) -> bool:
        """Return True if a head's output depends on other heads."""
        return "I" in self.filter_axes

    @property
    def window_axis(self) -> int:
        return self.filter_axes.index("W")

    def filter_shape(self, heads: int, head_dim: int, window: int) -> tuple[int, ...]:
        """Return the shape of one stream's filters."""
        sizes = {"W": window, "H": heads, "I": heads, "D": head_dim}
        return tuple(sizes[axis] for axis in self.filter_axes)

    def fan_in(self, heads: int, window: int) -> int:
        """Return the number of products in the sum of one output."""
        return window * (heads if self.mixes_heads else 1)

    def window_of(self, filters: Tensor) -> int:
        """Return the number of taps W of filters."""
        return filters.shape[self.window_axis]

    def normalized(self, filters: Tensor) -> Tensor:
        """Divide filters by the summed magnitudes of the taps that an output reads."""
        axes = [number for number, axis in enumerate(self.filter_axes) if axis in "WI"]
        # The clamp keeps filters of zeros at zero.
        return filters / filters.abs().sum(axes, keepdim=True).clamp(min=1e-12)

    def identity(self, heads: int, head_dim: int, window: int) -> Tensor:
        """Build the identity filters: 1 at lag 0 (of the head itself), 0 elsewhere."""
        import torch

        filters = torch.zeros(self.filter_shape(heads, head_dim, window))
        now = filters.select(self.window_axis, 0)
        if self.mixes_heads:
            axes = [axis for axis in self.filter_axes if axis != "W"]
            now.diagonal(dim1=axes.index("H"), dim2=axes.index("I")).fill_(1.0)
        else:
            now.fill_(1.0)
        return filters


def _per_head(taps: Tensor, lag: int, delayed: Tensor) -> Tensor:
    return taps[:, lag, None] * delayed


def _per_channel(taps: Tensor, lag: int, delayed: Tensor) -> Tensor:
    return taps[:, :, lag] * delayed


def _over_heads(taps: Tensor, lag: int, delayed: Tensor) -> Tensor:
    import torch

    return torch.einsum("ih,bthd->btid", taps[lag], delayed)


HEAD = Kind("head", ("H", "W"), _per_head, "one filter for each head", takes_long_filters=True)
MULTIHEAD = Kind("multihead", ("W", "H", "I"), _over_heads, "one filter for each pair of heads")
DEPTHWISE = Kind("depthwise", ("H", "D", "W"), _per_channel, "one filter for each channel")


def _check(kind: Kind) -> None:
    """Check the declared attributes of a kind; `check_kind` of reference.py checks the rest."""
    axes = kind.filter_axes
    named = isinstance(axes, tuple) and set(axes) <= set("WHID")
    if not named or len(set(axes)) < len(axes) or "W" not in axes:
        raise ValueError(
            f"conv_type {kind.name!r}: filter_axes={axes!r} must be a tuple of W, H, I and D, each "
            "at most once, and W among them"
        )
    if "I" in axes and "H" not in axes:
        raise ValueError(
            f"conv_type {kind.name!r}: filter_axes={axes} have the heads read from, I, without "
            "those written to, H"
        )
    if not callable(kind.add_lag):
        raise ValueError(f"conv_type {kind.name!r}: add_lag={kind.add_lag!r} must be a function")


KINDS: Registry[Kind] = Registry(
    "conv_type",
    Kind,
    words=("name", "meaning"),
    check=_check,
    others=("none",),
    entries=(HEAD, DEPTHWISE, MULTIHEAD),
)
get, names, register = KINDS.get, KINDS.names, KINDS.register


BUILT_IN = KINDS.own_names()
# The numbers of kinds in the C++ kernel and in Triton's decoding kernel.
KERNEL_NUMBERS = {HEAD.name: 0, DEPTHWISE.name: 1, MULTIHEAD.name: 2}


def takes_long_filters(name: str) -> bool:
    """Return True if filters of a kind, or of "none", may be long."""
    return name in KINDS and get(name).takes_long_filters


def mixes_heads(name: str) -> bool:
    """Return True if convolutions of a kind, or of "none", mix heads."""
    return name in KINDS and get(name).mixes_heads
