"""Kinds of causal convolution along time: the one table of them.

Everything that depends on a kind (shapes of filters, starts, FLOPs, choices of commands, words in
logs) asks its row here. A kind of one's own is a `Kind` given to `register`; without a kernel of a
faster backend the reference computes it, and the log says so. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.fields import NoOptions, build_options, changed_options
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
        Options: a frozen dataclass of plain values with defaults, see cat_lm/core/fields.py, of
            which `add_lag` gets an instance as its fourth argument; None for a kind without them.
        options: that instance.
    """

    name: str
    filter_axes: tuple[str, ...]
    add_lag: Callable[[Tensor, int, Tensor], Tensor]
    meaning: str
    takes_long_filters: bool = False
    Options: type | None = None
    options: Any = None

    def term(self, taps: Tensor, lag: int, delayed: Tensor) -> Tensor:
        """Return one lag's part of the sum, with the kind's options, by default their defaults."""
        if self.Options is None:
            return self.add_lag(taps, lag, delayed)
        options = self.Options() if self.options is None else self.options
        return self.add_lag(taps, lag, delayed, options)

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
    if (options := kind.Options) is not None:
        is_frozen = dataclasses.is_dataclass(options) and options.__dataclass_params__.frozen
        fields = dataclasses.fields(options) if is_frozen else ()
        if not is_frozen or any(field.default is dataclasses.MISSING for field in fields):
            raise ValueError(
                f"conv_type {kind.name!r}: its Options must be a frozen dataclass with defaults"
            )


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


def of(conv_type: str | Kind) -> Kind:
    """Return a kind that is given by its name, or itself."""
    return conv_type if isinstance(conv_type, Kind) else get(conv_type)


def with_options(kind: Kind, given: Mapping[str, Any]) -> Kind:
    """Return a kind with options, given as values. Raises UserError for those it does not have."""
    what = f"conv_options: conv_type={kind.name}"
    options = build_options(kind.Options or NoOptions, what, given)
    return dataclasses.replace(kind, options=options) if kind.Options else kind


def chosen(model: Any) -> Kind:
    """Return the kind of a section's or configuration's convolutions, with its options."""
    return with_options(get(model.conv_type), model.conv_options or {})


def label(model: Any) -> str:
    """Return the name of a model's kind with the options that differ from the defaults."""
    options = chosen(model).options
    changed = {} if options is None else changed_options(options)
    return model.conv_type + ":" * bool(changed) + ",".join(f"{k}={v}" for k, v in changed.items())


def option_problems(model: Any) -> list[str]:
    """Return what is wrong with a model's `conv_options`, in a line that begins with the key."""
    if model.conv_type == "none":
        said = "conv_options: say nothing with conv_type=none; leave them out"
        return [said] if model.conv_options else []
    try:
        chosen(model)
    except UserError as error:
        return [str(error)]
    return []
