"""`long_conv`: a convolution with long filters, what computes it, and its state for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution.api import check_shapes, packed_positions
from cat_lm.ops.long_filter import LENGTH, chunks
from cat_lm.ops.long_filter.filters import Modes
from cat_lm.ops.runtime import triton_launch
from cat_lm.ops.runtime.backends import BackendChoice, choose
from cat_lm.ops.runtime.flops import flops
from cat_lm.ops.runtime.operators import custom_op, register_in_turn
from cat_lm.ops.runtime.precision import without_autocast

if triton_launch.INSTALLED:
    from cat_lm.ops.long_filter import chunks_triton


def choose_backend(
    device: torch.device | str, dtype: torch.dtype, state: int, backend: str = "auto"
) -> BackendChoice:
    """Choose what computes chunks: `triton` on a GPU where it can, else `reference`, plain torch.

    Args:
        device, dtype: where and in what the inputs are.
        state: K, the numbers of state of a head and channel.
        backend: auto, or the name of one that must serve.

    Raises:
        ValueError: the name is unknown, or it cannot serve.
    """
    if backend not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"backend={backend!r}: must be one of auto, reference, triton")
    device = torch.device(device)

    def why_not(name: str) -> str | None:
        if name != "triton":
            return "they have reference and triton" if name == "cpu" else None
        obstacle = triton_launch.why_not(device, dtype)
        if obstacle is None and state > chunks_triton.MOST_STATE:
            return f"conv_state={state} is above its {chunks_triton.MOST_STATE}"
        return obstacle

    fast = ("reference",) if device.type == "cpu" else ("triton",)
    return choose("long filters", backend, device, why_not, fast, "reference")


def _flops(x: Tensor, modes: Modes, *_: object, **how: object) -> float:
    """Count the products of the recurrence, however many more the form makes that computes it."""
    products = (2 if modes.angle is None else 3) * state_size(modes) + 1
    return 2.0 * products * x.numel()


@flops(_flops)
def long_conv(
    x: Tensor,
    modes: Modes,
    bias: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    positions: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    length: int = LENGTH,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve x along time by filters as long as it, within documents.

        y[b,t,h,:] = bias[h,:] + sum_{j≤t} F[h,j] x[b,t−j,h,:]

    Sums and states are in the dtype of `modes`, fp32 at least. (What is not to be read is
    multiplied by exact zeros: infinities and NaN do spread, to their whole chunk and to all later
    tokens of the row, whatever the documents.)

    Args:
        x: [B, T, H, D].
        modes: the filters of H heads.
        bias: [H, D].
        document_ids: [B, T] integers.
        positions: [B, T] int32, the positions in documents that follow from them, if known.
        initial_state: [B, H, K, D], the returned state of the tokens before x; None for zeros.
        return_state: also return the state after x.
        length: L, the tokens of a chunk.
        backend: auto, reference or triton, see `choose_backend`.

    Returns:
        y [B, T, H, D] in the dtype of x, or (y, state [B, H, K, D]).

    Raises:
        ValueError: shapes that do not fit, a backend that cannot serve, or documents together with
            a state, which belongs to no document.
    """
    _check(x, modes, initial_state)
    positions = packed_positions(x, document_ids, None, positions)
    if positions is not None and (initial_state is not None or return_state):
        raise ValueError("packed documents cannot be used together with a state")
    with without_autocast(x):
        state = state_size(modes)
        if initial_state is None:
            batch, _, heads, width = x.shape
            initial_state = modes.rate.new_zeros(batch, heads, state, width)
        dtype = torch.promote_types(x.dtype, modes.rate.dtype)
        choice = choose_backend(x.device, dtype, state, backend).name
        y, last = _in_whole_chunks(x, modes, positions, initial_state, return_state, length, choice)
        if bias is not None:
            y = y + bias.to(y.dtype)
    return (y, last) if return_state else y


def state_size(modes: Modes) -> int:
    """Return the size K of the state of a head and channel."""
    return modes.rate.shape[1] * (1 if modes.angle is None else 2)


def continued(
    x: Tensor,
    modes: Modes,
    bias: Tensor | None,
    before: Tensor | None,
    padding_mask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Convolve x, zeros at padding, after the state `before`, and give the state after it.

    Args:
        padding_mask: [B, T] bool, False at padding; the state of a row that ends in it is that
            after its last real token.
    """
    outputs, after = long_conv(
        x, modes, bias, initial_state=before, return_state=True, backend=backend
    )
    if padding_mask is not None:  # Even if nothing is padded: a look would wait for the GPU.
        trailing = (padding_mask.flip(1).cumsum(1) == 0).sum(1)
        after = state_after(x, modes, x.shape[1] - trailing, before)
    return outputs, after


def state_after(
    x: Tensor, modes: Modes, lengths: Tensor, initial_state: Tensor | None = None
) -> Tensor:
    """Return the state [B, H, K, D] after the first `lengths` [B] tokens of every row of x.

    For rows that end in padding, whose state must not decay further.
    """
    with without_autocast(x):  # Autocast products would round the state.
        steps = torch.arange(x.shape[1], device=x.device)
        lags = lengths[:, None] - 1 - steps  # [B, T]
        cosines, sines = chunks.decay_factors(modes, lags.clamp(min=0).flatten())
        parts = [part.unflatten(2, lags.shape) for part in (cosines, sines) if part is not None]
        weights = torch.cat(parts, dim=1) * (lags >= 0)  # [H, K, B, T]
        state = torch.einsum("hkbt,bthd->bhkd", weights, x.to(weights.dtype))
        if initial_state is None:
            return state
        cosines, sines = chunks.decay_factors(modes, lengths)
        if sines is None:
            return state + torch.einsum("hkb,bhkd->bhkd", cosines, initial_state)
        real, imaginary = initial_state.chunk(2, dim=2)
        turned = [
            torch.einsum("hkb,bhkd->bhkd", a, real) + torch.einsum("hkb,bhkd->bhkd", b, imaginary)
            for a, b in ((cosines, -sines), (sines, cosines))
        ]
        return state + torch.cat(turned, dim=2)


def _in_whole_chunks(
    x: Tensor,
    modes: Modes,
    positions: Tensor | None,
    initial: Tensor,
    return_state: bool,
    length: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Convolve in whole chunks; the remainder, if its final state matters, in a shorter one."""
    time = x.shape[1]
    length = min(length, time)
    rest = time % length if return_state else 0
    outputs, state = [], initial
    for part, size in ((x[:, : time - rest], length), (x[:, time - rest :], rest)):
        if size:
            chunk = chunks.chunk_of(modes, size)
            y, state, _ = _forward(part, *chunk, positions, state.to(chunk.taps.dtype), backend)
            outputs.append(y)
    return torch.cat(outputs, dim=1) if rest else outputs[0], state


def _check(x: Tensor, modes: Modes, initial_state: Tensor | None) -> None:
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must be [B, T, H, D] and not empty, not {list(x.shape)}")
    if modes.rate.shape[0] != x.shape[2]:
        raise ValueError(f"filters are {modes.rate.shape[0]} heads', x {list(x.shape)} is not")
    state = (x.shape[0], x.shape[2], state_size(modes), x.shape[3])
    check_shapes(initial_state=(initial_state, state))


_CHUNK = "Tensor taps, Tensor read, Tensor write, Tensor carry, Tensor? positions"


def _kernels(backend: str) -> Any:
    return chunks_triton if backend == "triton" else chunks


@custom_op(
    "cat_lm::long_conv",
    f"(Tensor x, {_CHUNK}, Tensor initial, str backend) -> (Tensor, Tensor, Tensor)",
)
def _forward(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y, the last state and the states before chunks, see chunks.py."""
    *chunk, positions, initial, backend = given
    return _kernels(backend).forward(x, chunks.Chunk(*chunk), positions, initial)


@_forward.register_fake
def _(x, taps, read, write, carry, positions, initial, backend):
    batch, heads, state, width = initial.shape
    number = -(-x.shape[1] // taps.shape[1])
    kept = initial.new_empty(batch, number, heads, state, width)
    return x.new_empty(x.shape), initial.new_empty(initial.shape), kept


@custom_op(
    "cat_lm::long_conv_backward",
    f"(Tensor dy, Tensor dlast, Tensor x, {_CHUNK}, Tensor kept, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(dy: Tensor, dlast: Tensor, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of x, taps, read, write, carry and the initial state."""
    *chunk, positions, kept, backend = given
    dx, found, dinitial = _kernels(backend).backward(
        dy, dlast, x, chunks.Chunk(*chunk), positions, kept
    )
    return dx, *found, dinitial


@_backward.register_fake
def _(dy, dlast, x, taps, read, write, carry, positions, kept, backend):
    return tuple(s.new_empty(s.shape) for s in (x, taps, read, write, carry, dlast))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, *chunk, positions, _, ctx.backend = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x, *chunk, positions, output[2])


def _gradients(ctx: Any, dy: Tensor, dlast: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, *chunk, positions, kept = ctx.saved_tensors
    with without_autocast(x):
        *found, dinitial = _backward(dy, dlast, x, *chunk, positions, kept, ctx.backend)
    return *found, None, dinitial, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
register_in_turn(_forward, _backward)
