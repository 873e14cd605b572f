"""Makes a backend's convolution an operator of torch: its fake tensors, gradients and torch.vmap.

The convolution of a head or a channel knows nothing of the others, so S convolutions over H heads
are one over S·H heads under torch.vmap. Where all S share their filters they are one over S·B rows.
Otherwise (filters that mix heads, which S·H heads would make S times as large; documents or angles
that differ) they run in turn, at the cost of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.runtime.operators import (
    custom_op,
    fold_vmap_axis,
    register_in_turn,
    run_sequentially,
)

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
        if not _joins_heads(conv_type, axes[4:]):
            return run_sequentially(convolve, info, axes, conv_type, *tensors)
        joined = (
            fold_vmap_axis(size, *how) for how in zip(tensors, of_tensors, (2, 0, 0), strict=False)
        )
        y = convolve(conv_type, *joined, positions, *rotary)
        return y.unflatten(2, (size, -1)), 2

    @differentiate.register_vmap
    def _(info, axes, conv_type, *given):
        size, (*tensors, wanted) = info.batch_size, given
        positions, *rotary = tensors[3:]
        if not _joins_heads(conv_type, axes[4:7]):
            return run_sequentially(differentiate, info, axes, conv_type, *given)
        joined = (
            fold_vmap_axis(size, *how) for how in zip(tensors, axes[1:], (2, 2, 0), strict=False)
        )
        found = differentiate(conv_type, *joined, positions, *rotary, wanted)
        split = tuple(
            x.unflatten(axis, (size, -1)).movedim(axis, 0) if want else x.new_empty(size, 0)
            for x, axis, want in zip(found, (2, 0, 0), wanted, strict=True)
        )
        return split, (0, 0, 0)

    return convolve


def packed_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    empty_output: Callable[[str, Tensor], Tensor],
) -> torch.library.CustomOpDef:
    """Register `cat_lm::<name>`, which convolves packed q, k and v, and its gradient.

        y_s = RoPE_s(F_s * x_s + b_s)     for s in q, k, v, with RoPE on q and k alone

    of x [B, T, H, 3, D], filters of x's dtype, or None for a stream that is left as it is, bias
    [H, 3, D], positions [B, T] int32, and cos and sin, [B or 1, T, R], to y_s [B, T, H, D].

    Args:
        forward: (kind, x, the filters as a list, bias, positions, cos, sin) to q, k and v.
        backward: (kind, the gradients of q, k and v as a list, x, filters, positions, cos, sin, and
            whether the gradients of x, of filters and of the bias are wanted) to these: dx packed
            as x, dF for each filter, dbias. What is not wanted has no numbers.
        empty_output: as that of `convolution_operator`, for a stream.
    """
    filters = "Tensor? q_filter, Tensor? k_filter, Tensor? v_filter"

    def join(conv_type: str, qkv: Tensor, q: Any, k: Any, v: Any, *others: Any) -> tuple:
        return forward(conv_type, qkv, [q, k, v], *others)

    def join_back(
        conv_type: str, dq: Any, dk: Any, dv: Any, qkv: Tensor, q: Any, k: Any, v: Any, *others: Any
    ) -> tuple:
        return backward(conv_type, [dq, dk, dv], qkv, [q, k, v], *others)

    schema = f"(str conv_type, Tensor qkv, {filters}, Tensor? bias, {_PLACES})"
    convolve = custom_op(f"cat_lm::{name}", f"{schema} -> (Tensor, Tensor, Tensor)")(join)
    schema = f"(str conv_type, Tensor dq, Tensor dk, Tensor dv, Tensor qkv, {filters}, {_PLACES}"
    results = ", ".join(["Tensor"] * 5)
    schema += f", bool[] wanted) -> ({results})"
    differentiate = custom_op(f"cat_lm::{name}_backward", schema)(join_back)

    @convolve.register_fake
    def _(conv_type, qkv, *_):
        return tuple(empty_output(conv_type, stream) for stream in qkv.unbind(3))

    @differentiate.register_fake
    def _(conv_type, dq, dk, dv, qkv, *given):
        return tuple(empty_packed_gradients(qkv, given[:3], given[-1]))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.conv_type, *kept, bias, positions, cos, sin = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(*kept, positions, cos, sin)

    def gradients(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = [*ctx.needs_input_grad[1:5], ctx.has_bias and ctx.needs_input_grad[5]]
        wanted = [needs[0], any(needs[1:4]), needs[4]]
        found = differentiate(ctx.conv_type, *dy, *ctx.saved_tensors, wanted)
        found = (g if needed else None for g, needed in zip(found, needs, strict=True))
        return None, *found, None, None, None

    convolve.register_autograd(gradients, setup_context=keep)
    register_in_turn(convolve, differentiate)
    return convolve


def empty_packed_gradients(
    qkv: Tensor, filters: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor]:
    """Return uninitialized gradients of x, the three filters and bias; empty where not wanted."""
    shapes = [taps.shape if wanted[1] and taps is not None else (0,) for taps in filters]
    shapes = [qkv.shape if wanted[0] else (0,), *shapes, qkv.shape[2:] if wanted[2] else (0,)]
    return [qkv.new_empty(shape) for shape in shapes]


def _joins_heads(conv_type: str, shared: Sequence[int | None]) -> bool:
    """Return True if S convolutions equal one over S·H heads.

    Args:
        shared: the axes of positions and angles.
    """
    return not kinds.get(conv_type).mixes_heads and all(axis is None for axis in shared)
