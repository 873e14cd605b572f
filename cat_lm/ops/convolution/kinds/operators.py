"""Makes a backend's convolution an operator of torch: its fake tensors, gradients and torch.vmap.

The convolution of a head or a channel knows nothing of the others, so S convolutions over H heads
are one over S·H heads under torch.vmap. Where all S share their filters they are one over S·B rows.
Otherwise (filters that mix heads, which S·H heads would make S times as large; documents that
differ; rotation) they run in turn, at the cost of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.runtime.operators import custom_op, fold_vmap_axis, run_sequentially

Forward, Backward = Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor, Tensor]]
_PLACES = "Tensor? positions, Tensor? cos, Tensor? sin"
_FORWARD = f"(str conv_type, Tensor x, Tensor filters, Tensor? bias, {_PLACES}) -> Tensor"
# To the gradients of x, filters and bias.
_BACKWARD = f"(str conv_type, Tensor dy, Tensor x, Tensor filters, {_PLACES}, bool[] wanted)"
_BACKWARD += " -> (Tensor, Tensor, Tensor)"


def empty_gradients(x: Tensor, filters: Tensor, wanted: list[bool]) -> list[Tensor]:
    """Return uninitialized gradients of x, filters and bias; empty where not wanted."""
    shapes = (x.shape, filters.shape, x.shape[2:])
    return [x.new_empty(s if want else (0,)) for s, want in zip(shapes, wanted, strict=True)]


def convolution_operator(
    name: str, forward: Forward, backward: Backward, empty_output: Callable[[str, Tensor], Tensor]
) -> torch.library.CustomOpDef:
    """Register `cat_lm::<name>` and its gradient, which compute as the two functions do.

    Args:
        empty_output: (kind, x) to room for y, laid out as `forward` lays it out.
    """

    convolve = custom_op(f"cat_lm::{name}", _FORWARD)(forward)
    differentiate = custom_op(f"cat_lm::{name}_backward", _BACKWARD)(backward)
    convolve.register_fake(lambda conv_type, x, *_: empty_output(conv_type, x))
    differentiate.register_fake(
        lambda conv_type, dy, x, filters, *others: tuple(empty_gradients(x, filters, others[-1]))
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.conv_type, x, filters, bias, *others = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, filters, *others)

    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [*ctx.needs_input_grad[1:3], ctx.has_bias and ctx.needs_input_grad[3]]
        found = differentiate(ctx.conv_type, dy, *ctx.saved_tensors, wanted)
        found = (x if want else None for x, want in zip(found, wanted, strict=True))
        return None, *found, None, None, None

    convolve.register_autograd(gradients, setup_context=keep)

    @convolve.register_vmap
    def _(info, axes, conv_type, *tensors):
        size, of_tensors = info.batch_size, axes[1:]
        x, filters, bias, positions, *rotary = tensors
        if rotary[0] is None and axes[2] is None and axes[3] is None:
            x, positions = (
                fold_vmap_axis(size, s, of_tensors[i], 0) for s, i in ((x, 0), (positions, 3))
            )
            y = convolve(conv_type, x, filters, bias, positions, None, None)
            return y.unflatten(0, (size, -1)), 0
        if not _joins_heads(conv_type, axes[4], rotary):
            return run_sequentially(convolve, info, axes, conv_type, *tensors)
        joined = (
            fold_vmap_axis(size, *how) for how in zip(tensors, of_tensors, (2, 0, 0), strict=False)
        )
        y = convolve(conv_type, *joined, positions, None, None)
        return y.unflatten(2, (size, -1)), 2

    @differentiate.register_vmap
    def _(info, axes, conv_type, *given):
        size, (*tensors, wanted) = info.batch_size, given
        positions, *rotary = tensors[3:]
        if not _joins_heads(conv_type, axes[4], rotary):
            return run_sequentially(differentiate, info, axes, conv_type, *given)
        joined = (
            fold_vmap_axis(size, *how) for how in zip(tensors, axes[1:], (2, 2, 0), strict=False)
        )
        found = differentiate(conv_type, *joined, positions, None, None, wanted)
        split = tuple(
            x.unflatten(axis, (size, -1)).movedim(axis, 0) if want else x.new_empty(size, 0)
            for x, axis, want in zip(found, (2, 0, 0), wanted, strict=True)
        )
        return split, (0, 0, 0)

    return convolve


def _joins_heads(conv_type: str, axis_of_positions: int | None, rotary: list[Any]) -> bool:
    """Return True if S convolutions equal one over S·H heads."""
    is_apart = not kinds.get(conv_type).mixes_heads
    return is_apart and axis_of_positions is None and rotary[0] is None
