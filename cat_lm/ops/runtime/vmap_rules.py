"""How the convolutions' operators run under torch.vmap: S of them as one.

The convolution of a head or a channel knows nothing of the others, so S convolutions over H heads
are one over S·H heads. Where all S share their filters they are one over S·B rows. Otherwise
(filters that mix heads, which S·H heads would make S times as large; documents that differ) they
run in turn, at the cost of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Axis = int | None
Axes = tuple[Axis, Axis, Axis, Axis]
# (x, filters, bias, positions) to y.
Forward = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
# (dy, x, filters, positions) to the gradients of x, filters and bias; those not wanted are empty.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


def forward(
    size: int, axes: Axes, apply: Forward, *tensors: Tensor | None, mixes_heads: bool
) -> tuple[Tensor, int]:
    """y of S convolutions, and its vmapped axis.

    Args:
        size: S.
        axes: the vmapped axis of x [B, T, H, D], filters, bias and positions; none where all S
            share a tensor.
        apply: one convolution.
        tensors: x, filters, bias and positions.
        mixes_heads: whether it is the multi-head convolution.
    """
    x, filters, bias, positions = tensors
    if axes[1] is None and axes[2] is None:
        x, positions = folded(size, x, axes[0], 0), folded(size, positions, axes[3], 0)
        return apply(x, filters, bias, positions).unflatten(0, (size, -1)), 0
    if mixes_heads or axes[3] is not None:
        return in_turn(size, axes, apply, tensors)
    x = folded(size, x, axes[0], 2)
    filters, bias = folded(size, filters, axes[1], 0), folded(size, bias, axes[2], 0)
    return apply(x, filters, bias, positions).unflatten(2, (size, -1)), 2


def backward(
    size: int, axes: Axes, apply: Backward, *tensors: Tensor | None, mixes_heads: bool
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The gradients of S convolutions, each of its own, and their vmapped axes.

    Args:
        axes, tensors: of dy [B, T, H, D], x, filters and positions.
        apply: the gradients of one convolution.

    The others are those of `forward`.
    """
    dy, x, filters, positions = tensors
    if mixes_heads or axes[3] is not None:
        return in_turn(size, axes, apply, tensors)
    dy, x = folded(size, dy, axes[0], 2), folded(size, x, axes[1], 2)
    found = apply(dy, x, folded(size, filters, axes[2], 0), positions)
    split, heads = [], (2, 0, 0)
    for gradient, axis in zip(found, heads, strict=True):
        wanted = gradient.numel() > 0
        split.append(
            gradient.unflatten(axis, (size, -1)).movedim(axis, 0)
            if wanted
            else gradient.new_empty(size, 0)
        )
    return tuple(split), (0, 0, 0)


def folded(size: int, tensor: Tensor | None, axis: Axis, into: int) -> Tensor | None:
    """The vmapped axis and axis `into` as one, with the S outside."""
    if tensor is None:
        return None
    if axis is None:
        tensor = tensor.unsqueeze(into).expand(*tensor.shape[:into], size, *tensor.shape[into:])
    else:
        tensor = tensor.movedim(axis, into)
    return tensor.flatten(into, into + 1)


def in_turn(
    size: int, axes: tuple[Axis, ...], apply: Callable[..., Any], tensors: tuple[Tensor | None, ...]
) -> tuple[Any, Any]:
    """Any operator, once for each of the S: its results and their vmapped axes."""
    pairs = list(zip(tensors, axes, strict=True))
    found = [
        apply(*(t if axis is None else t.select(axis, i) for t, axis in pairs)) for i in range(size)
    ]
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0,) * len(found[0])
