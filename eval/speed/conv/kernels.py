"""The causal convolutions that are timed: this project's backends, and what one would use instead.

Other libraries are given everything, filters too, as they like it best, and its making is not
timed: a filter for each of C = H·D channels, the newest input's tap last, and [B, C, T] where they
want that. torch's is given each layout that might suit it, and is timed as one would use it here
too, from [B, T, H, D] and this project's filters; the fastest of these is what others are held to.
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
from cat_lm.ops.convolution import kinds
from eval.speed.choices import QKV, QKV_KIND


@dataclass(frozen=True)
class ConvCase:
    """Fix what is convolved: x [B, T, H, D] by filters of W taps.

    `conv_type` is a kind's name, or qkv for the whole step of `eval.speed.conv.qkv`.
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
    def kind(self) -> kinds.Kind:
        """The kind of convolution; of the step `qkv`, what it convolves by."""
        return kinds.get(QKV_KIND if self.conv_type == QKV else self.conv_type)

    @property
    def filter_shape(self) -> tuple[int, ...]:
        return self.kind.filter_shape(self.heads, self.head_dim, self.window)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def backend_arguments(self) -> dict[str, Any]:
        """Name the kind and its sizes for `cat_lm.ops.choose_backend`."""
        return {
            "conv_type": self.kind.name,
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
        convolve: from x and filters in the kernel's own layout to y.
        arrange: from [B, T, H, D] to the kernel's own layout, which is not timed.
        arrange_gradient: the same for the gradient of y, where it is laid out otherwise than x.
        restore: back from it, for the check.
        arrange_filters: from this project's layout to the kernel's own, which is not timed.
        restore_filters: from the gradient of these to that of this project's, for the check.
    """

    name: str
    timed: str
    convolve: Callable[[Tensor, Tensor], Tensor]
    arrange: Callable[[Tensor], Tensor] = Tensor.contiguous
    restore: Callable[[Tensor], Tensor] = Tensor.contiguous
    arrange_filters: Callable[[Tensor], Tensor] = Tensor.contiguous
    restore_filters: Callable[[Tensor], Tensor] = Tensor.contiguous
    arrange_gradient: Callable[[Tensor], Tensor] | None = None


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
    convolve = partial(ops.convolve, case.kind.name, backend=backend)
    return [Kernel(backend, f"cat_lm.ops.convolve, {case.kind.name}, [B, T, H, D]", convolve)]


# torch's own convolution


def _torch_conv1d(case: ConvCase) -> list[Kernel]:
    _refuse_unknown_kind(case)
    if case.kind.mixes_heads:
        shape, inside, groups = "[B·D, H, T]", _conv1d_over_heads, 1
        arrange, restore = _heads_as_channels, partial(_from_heads_as_channels, case=case)
        filters_to, filters_from = _taps_of_pairs, _from_taps_of_pairs
    else:
        shape, inside, groups = "[B, H·D, T]", _conv1d_groups, case.heads * case.head_dim
        arrange, restore = _channels_first, partial(_from_channels_first, case=case)
        filters_to, filters_from = _channel_filters(case)

    def from_time_first(x: Tensor, filters: Tensor) -> Tensor:
        return restore(inside(arrange(x), filters_to(filters)))

    def contiguous(x: Tensor) -> Tensor:
        return arrange(x).contiguous()

    def padded(x: Tensor) -> Tensor:
        return F.pad(arrange(x), (case.window - 1, 0)).contiguous()

    def without_padding(padded: Tensor) -> Tensor:
        return restore(padded[..., -case.time :])

    return [
        Kernel(
            "conv1d",
            f"torch's conv1d given, and returning, contiguous {shape}",
            inside,
            contiguous,
            restore,
            filters_to,
            filters_from,
        ),
        Kernel(
            "conv1d, padded",
            f"the same, given {shape} with W - 1 zeros before it",
            partial(_conv_of_padded, groups=groups),
            padded,
            without_padding,
            filters_to,
            filters_from,
            contiguous,
        ),
        Kernel(
            "conv1d, channels last",
            f"the same, given {shape} with zeros before it, in torch's channels_last layout",
            partial(_conv_of_channels_last, groups=groups),
            lambda x: _channels_last(padded(x)),
            lambda y: without_padding(y[:, :, 0]),
            filters_to,
            filters_from,
            lambda dy: _channels_last(arrange(dy)),
        ),
        Kernel(
            "conv1d, transposed",
            f"torch's conv1d from [B, T, H, D] through {shape} and back as a view",
            from_time_first,
        ),
    ]


def _conv1d_groups(x: Tensor, taps: Tensor) -> Tensor:
    """`conv1d` with a group for each channel: x [B, C, T], taps [C, W]."""
    channels, time = x.shape[1:]
    return F.conv1d(x, taps[:, None], padding=taps.shape[1] - 1, groups=channels)[..., :time]


def _conv1d_over_heads(x: Tensor, weight: Tensor) -> Tensor:
    """`conv1d` with heads as channels: x [B·D, H, T], weight [H_out, H_in, W]."""
    return F.conv1d(x, weight, padding=weight.shape[2] - 1)[..., : x.shape[2]]


def _conv_of_padded(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """`conv1d` of x [B, C, W - 1 + T], padded before it was given, by weight [C, (C,) W]."""
    return F.conv1d(x, weight if weight.dim() == 3 else weight[:, None], groups=groups)


def _conv_of_channels_last(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """The same on x [B, C, 1, W - 1 + T], whose channels lie side by side in memory."""
    weight = _channels_last(weight if weight.dim() == 3 else weight[:, None])
    return F.conv2d(x, weight, groups=groups)


def _channels_last(x: Tensor) -> Tensor:
    """[B, C, T] as [B, C, 1, T] in torch's channels_last layout."""
    return x[:, :, None].contiguous(memory_format=torch.channels_last)


def _taps_of_pairs(filters: Tensor) -> Tensor:
    return filters.permute(1, 2, 0).flip(2)


def _from_taps_of_pairs(weight: Tensor) -> Tensor:
    return weight.flip(2).permute(2, 0, 1)


def _channel_filters(
    case: ConvCase,
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """To [C, W] with the newest input's tap last, and from its gradient to that of the filters."""
    has_channels = "D" in case.kind.filter_axes

    def arrange(filters: Tensor) -> Tensor:
        if not has_channels:
            filters = filters.repeat_interleave(case.head_dim, dim=0)
        return filters.reshape(case.heads * case.head_dim, case.window).flip(1)

    def restore(gradient: Tensor) -> Tensor:
        channels = gradient.flip(1).unflatten(0, (case.heads, case.head_dim))
        return channels if has_channels else channels.sum(1)

    return arrange, restore


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
    return [
        Kernel(
            "fla",
            "flash-linear-attention's causal_conv1d, Triton, [B, T, H·D]",
            lambda x, taps: convolve(x, taps, backend="triton")[0],
            lambda x: x.flatten(2).contiguous(),
            lambda y: y.unflatten(2, (case.heads, case.head_dim)),
            *_channel_filters(case),
        )
    ]


def _causal_conv1d(case: ConvCase) -> list[Kernel]:
    if not 2 <= case.window <= 4:
        raise _Absent("has kernels for windows of 2, 3 and 4 only")
    convolve = _import_for_gpu(case, ("causal_conv1d",), "causal_conv1d_fn")
    restore = partial(_from_channels_first, case=case)
    return [
        Kernel(
            "causal-conv1d",
            "given, and returning, contiguous [B, H·D, T]",
            convolve,
            lambda x: _channels_first(x).contiguous(),
            restore,
            *_channel_filters(case),
        ),
        Kernel(
            "causal-conv1d, channels last",
            "given [B, H·D, T] as a view of contiguous [B, T, H·D]",
            convolve,
            lambda x: _channels_first(x.contiguous()),
            restore,
            *_channel_filters(case),
        ),
    ]


def _refuse_unknown_kind(case: ConvCase) -> None:
    if case.kind.name not in kinds.BUILT_IN:
        raise _Absent("is given the filters of this project's own kinds only")


def _import_for_gpu(case: ConvCase, modules: tuple[str, ...], function: str) -> Any:
    _refuse_unknown_kind(case)
    if case.kind.mixes_heads:
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
    **{backend: partial(_own, backend) for backend in ops.BACKENDS.names()},
    "conv1d": _torch_conv1d,
    "fla": _flash_linear_attention,
    "causal-conv1d": _causal_conv1d,
}
