"""The causal convolutions that are timed: this project's backends, and what one would use instead.

Every kernel is asked for the same sum, with filters in this project's layout; what it does to them
to suit itself is part of its time, as it is of its user's. Kernels that want [B, C, T] with C = H·D
are timed twice: given it, contiguous, as if nobody had to transpose, and from [B, T, H, D].
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm import ops

CONVOLUTIONS = {
    "head": ops.head_conv,
    "depthwise": ops.depthwise_conv,
    "multihead": ops.multihead_conv,
}


@dataclass(frozen=True)
class ConvCase:
    """What is convolved: x [B, T, H, D] by filters of W taps.

    `conv_type` is head, depthwise, multihead, or qkv for the whole step of `eval.speed.qkv`.
    """

    conv_type: str
    batch: int
    time: int
    heads: int
    head_dim: int
    window: int
    dtype: str
    device: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.time, self.heads, self.head_dim

    @property
    def filter_shape(self) -> tuple[int, ...]:
        heads, width, window = self.heads, self.head_dim, self.window
        return {
            "head": (heads, window),
            "depthwise": (heads, width, window),
            "multihead": (window, heads, heads),
        }[self.conv_type]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def backend_arguments(self) -> dict[str, Any]:
        """How `cat_lm.ops.choose_backend` is asked; the step `qkv` convolves by heads."""
        return {
            "conv_type": "head" if self.conv_type == "qkv" else self.conv_type,
            "device": self.device,
            "dtype": self.torch_dtype,
            "window": self.window,
            "heads": self.heads,
            "head_dim": self.head_dim,
        }

    def describe(self) -> str:
        return f"{self.conv_type} W={self.window} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Kernel:
    """Something that convolves.

    Attributes:
        name: its row in the table.
        timed: what its time includes, in words.
        convolve: from x in the kernel's own layout, and filters in this project's, to y.
        arrange: from [B, T, H, D] to the kernel's own layout, which is not timed.
        restore: back from it, for the check.
    """

    name: str
    timed: str
    convolve: Callable[[Tensor, Tensor], Tensor]
    arrange: Callable[[Tensor], Tensor] = Tensor.contiguous
    restore: Callable[[Tensor], Tensor] = Tensor.contiguous


def kernels_for(case: ConvCase, names: Sequence[str]) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels that can serve a case, and for those that cannot, why.

    Args:
        names: which to look for, of `choices.KERNELS`.
    """
    kernels, absent = [], {}
    for name in names:
        try:
            kernels += _FINDERS[name](case)
        except _Absent as reason:
            absent[name] = str(reason)
    return kernels, absent


class _Absent(Exception):
    """A kernel cannot serve; the message says why."""


def _own(backend: str, case: ConvCase) -> list[Kernel]:
    try:
        ops.choose_backend(**case.backend_arguments, backend=backend)
    except ValueError as error:
        raise _Absent(str(error)) from None
    convolve = CONVOLUTIONS[case.backend_arguments["conv_type"]]
    words = f"cat_lm.ops.{convolve.__name__}, [B, T, H, D]"
    return [Kernel(backend, words, partial(convolve, backend=backend))]


# torch's own convolution


def _torch_conv1d(case: ConvCase) -> list[Kernel]:
    if case.conv_type == "multihead":
        shape, inside = "[B·D, H, T]", _conv1d_over_heads
        arrange, restore = _heads_as_channels, partial(_from_heads_as_channels, case=case)
    else:
        shape, inside = "[B, H·D, T]", partial(_conv1d_groups, conv_type=case.conv_type)
        arrange, restore = _channels_first, partial(_from_channels_first, case=case)

    def from_time_first(x: Tensor, filters: Tensor) -> Tensor:
        return restore(inside(arrange(x), filters))

    return [
        Kernel(
            "conv1d",
            f"torch's conv1d given, and returning, contiguous {shape}",
            inside,
            lambda x: arrange(x).contiguous(),
            restore,
        ),
        Kernel(
            "conv1d, transposed",
            f"torch's conv1d from [B, T, H, D] through {shape} and back as a view",
            from_time_first,
        ),
    ]


def _conv1d_groups(x: Tensor, filters: Tensor, conv_type: str) -> Tensor:
    """`conv1d` with a group for each channel: x [B, C, T]."""
    channels, time = x.shape[1:]
    taps = _taps_of_channels(filters, conv_type, channels)
    return F.conv1d(x, taps[:, None], padding=taps.shape[1] - 1, groups=channels)[..., :time]


def _conv1d_over_heads(x: Tensor, filters: Tensor) -> Tensor:
    """`conv1d` with heads as channels: x [B·D, H, T]."""
    weight = filters.permute(1, 2, 0).flip(2)
    return F.conv1d(x, weight, padding=weight.shape[2] - 1)[..., : x.shape[2]]


def _taps_of_channels(filters: Tensor, conv_type: str, channels: int) -> Tensor:
    """[C, W], the newest input's tap last, as libraries that correlate want it."""
    if conv_type == "head":
        filters = filters.repeat_interleave(channels // filters.shape[0], dim=0)
    return filters.reshape(channels, -1).flip(1)


def _channels_first(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _from_channels_first(y: Tensor, case: ConvCase) -> Tensor:
    return y.transpose(1, 2).unflatten(2, (case.heads, case.head_dim))


def _heads_as_channels(x: Tensor) -> Tensor:
    return x.permute(0, 3, 2, 1).flatten(0, 1)


def _from_heads_as_channels(y: Tensor, case: ConvCase) -> Tensor:
    return y.unflatten(0, (case.batch, case.head_dim)).permute(0, 3, 2, 1)


# Other libraries, where they are installed


def _flash_linear_attention(case: ConvCase) -> list[Kernel]:
    # The module has moved between versions; the first name is kept for old users since.
    modules = ("fla.modules.convolution", "fla.modules.causal_conv1d")
    convolve = _import_for_gpu(case, modules, "causal_conv1d")

    def from_time_first(x: Tensor, filters: Tensor) -> Tensor:
        taps = _taps_of_channels(filters, case.conv_type, x.shape[2])
        return convolve(x, taps.contiguous(), backend="triton")[0]

    return [
        Kernel(
            "fla",
            "flash-linear-attention's causal_conv1d, Triton, [B, T, H·D]",
            from_time_first,
            lambda x: x.flatten(2).contiguous(),
            lambda y: y.unflatten(2, (case.heads, case.head_dim)),
        )
    ]


def _causal_conv1d(case: ConvCase) -> list[Kernel]:
    if not 2 <= case.window <= 4:
        raise _Absent("has kernels for windows of 2, 3 and 4 only")
    convolve = _import_for_gpu(case, ("causal_conv1d",), "causal_conv1d_fn")

    def inside(x: Tensor, filters: Tensor) -> Tensor:
        return convolve(x, _taps_of_channels(filters, case.conv_type, x.shape[1]).contiguous())

    restore = partial(_from_channels_first, case=case)
    return [
        Kernel(
            "causal-conv1d",
            "given, and returning, contiguous [B, H·D, T]",
            inside,
            lambda x: _channels_first(x).contiguous(),
            restore,
        ),
        Kernel(
            "causal-conv1d, channels last",
            "given [B, H·D, T] as a view of contiguous [B, T, H·D]",
            inside,
            lambda x: _channels_first(x.contiguous()),
            restore,
        ),
    ]


def _import_for_gpu(case: ConvCase, modules: tuple[str, ...], function: str) -> Any:
    if case.conv_type == "multihead":
        raise _Absent("convolves each channel on its own")
    if not case.device.startswith("cuda"):
        raise _Absent("runs on a GPU only")
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), function)
        except Exception as error:  # a broken installation may raise anything
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
    raise _Absent(f"cannot be imported ({'; '.join(dict.fromkeys(reasons))})")


_FINDERS: dict[str, Callable[[ConvCase], list[Kernel]]] = {
    **{backend: partial(_own, backend) for backend in ops.BACKENDS},
    "conv1d": _torch_conv1d,
    "fla": _flash_linear_attention,
    "causal-conv1d": _causal_conv1d,
}
