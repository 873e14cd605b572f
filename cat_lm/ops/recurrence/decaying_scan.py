"""Scan with a state that decays, for Mamba and gated linear attention.

    S_t = exp(r_t ⊙ a) ⊙ S_{t−1} + k_t v_t^T,   o_t = S_t^T q_t

One step at a time, so that only decays are raised to powers, never their inverses: nothing can
overflow where r ⊙ a ≤ 0, however long or strong the decay. A step's state is changed in place and
is not kept: the backward pass is written out, and makes the states of EVERY steps again from the
one before them. In fp32 a C++ kernel does both on a CPU (decaying_scan_cpu.py) and Triton kernels
on a GPU (decaying_scan_triton.py); in fp64, on a CPU without a compiler and on a GPU without
Triton, plain torch does (decaying_scan_torch.py). Nothing is computed in less than fp32.

Where a document starts the exponent is so far below 0 that exp gives 0 exactly, in every backend:
nothing of the documents before it is left, and no gradient goes back to them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.recurrence import EVERY, decaying_scan_cpu, decaying_scan_torch
from cat_lm.ops.recurrence.backends import SELECTIVE_SCAN, choose_backend
from cat_lm.ops.runtime.documents import check_document_ids, document_starts
from cat_lm.ops.runtime.flops import flops
from cat_lm.ops.runtime.operators import custom_op, fold_vmap_axis
from cat_lm.ops.runtime.precision import without_autocast
from cat_lm.ops.runtime.triton_launch import INSTALLED

if INSTALLED:
    from cat_lm.ops.recurrence import decaying_scan_triton

# A rate of this size times any |a| above 1e-28 is a total decay. Not infinity: its gradient is NaN.
TOTAL = 1e30


def _flops(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor, **how: object) -> float:
    """Count 5 for each number of the state; 9 where each has a decay of its own, as for Mamba."""
    sizes = zip(rate.shape[-2:], a.shape[-2:], strict=True)
    own_decay = all(max(of_rate, of_a) > 1 for of_rate, of_a in sizes)
    return (9.0 if own_decay else 5.0) * q.numel() * v.shape[-1]


@flops(_flops)
def decaying_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    a: Tensor,
    *,
    document_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute o [B, T, H, V] of the recurrence above, and the last state if asked for.

    It may be differentiated once, and batched with torch.func.vmap. Sums and states are in the
    widest dtype given, at least fp32, to which the inputs are cast; o has the dtype of v.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        rate: r, [B, T, H, K or 1, V or 1], with r ⊙ a ≤ 0.
        a: [H or 1, K or 1, V or 1], not 0 where documents start.
        document_ids: [B, T] integers; no document reads another. The first one of a row goes on
            from `initial_state`.
        initial_state: S_0, [B, H, K, V]; none: zeros.
        return_state: whether to return (o, S_T), the state in the dtype of the sums.
        backend: auto, torch, cpu or triton, see backends.py; auto takes what serves.

    Raises:
        ValueError: other shapes, or the backend asked for cannot serve.
    """
    _check(q, k, v, rate, a)
    state = (q.shape[0], *q.shape[2:], v.shape[-1])
    if initial_state is None:
        initial_state = q.new_zeros(state)
    elif initial_state.shape != state:
        raise ValueError(f"initial_state is {list(initial_state.shape)}, not {list(state)}")
    given = (q, k, v, rate, a, initial_state)
    widest = functools.reduce(torch.promote_types, (s.dtype for s in given), torch.float32)
    q, k, values, rate, a, initial_state = (s.to(widest) for s in given)
    if document_ids is not None:
        check_document_ids(document_ids, *q.shape[:2])
        # Reset after the cast, because half precision cannot represent TOTAL.
        rate = _reset_at_starts(rate, a, document_ids)
    inputs = (q, k, values, rate, a, initial_state)
    out, last, _ = _forward(backend, *(s[None] for s in inputs))
    out = out.squeeze(0).to(v.dtype)
    return (out, last.squeeze(0)) if return_state else out


def _reset_at_starts(rate: Tensor, a: Tensor, document_ids: Tensor) -> Tensor:
    """Make the decay total at each document start, except at a row's first step."""
    starts = document_starts(document_ids)[:, 1:]
    total = torch.where(a > 0, -TOTAL, TOTAL).to(rate.dtype)
    # Numbers of the state that share a rate have an a of one sign.
    keys, values = (slice(None) if size > 1 else slice(1) for size in rate.shape[-2:])
    cut = torch.where(starts[..., None, None, None], total[..., keys, values], rate[:, 1:])
    return torch.cat([rate[:, :1], cut], dim=1)


def _check(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> None:
    state = (*q.shape[2:], *v.shape[3:])  # H, K, V
    fits = len(state) == 3 and k.shape == q.shape and v.shape[:3] == q.shape[:3]
    fits = fits and rate.dim() == 5 and rate.shape[:3] == q.shape[:3] and a.dim() == 3
    for sizes, most in ((rate.shape[3:], state[1:]), (a.shape, state)):
        fits = fits and all(n in (1, m) for n, m in zip(sizes, most, strict=True))
    if not fits:
        shapes = ", ".join(str(list(s.shape)) for s in (q, k, v, rate, a))
        raise ValueError(f"q, k, v, rate and a do not fit each other: {shapes}")


def _kernels(backend: str, *tensors: Tensor) -> Any:
    """Return the module that computes the scan of these tensors, forward and backward."""
    kinds = {(s.device, s.dtype) for s in tensors}
    name = choose_backend(SELECTIVE_SCAN, *kinds.pop(), backend).name
    if kinds or name == "torch":
        return decaying_scan_torch
    return decaying_scan_cpu if name == "cpu" else decaying_scan_triton


_INPUTS = "str backend, Tensor q, Tensor k, Tensor v, Tensor rate, Tensor a"


@custom_op("cat_lm::decaying_scan", f"({_INPUTS}, Tensor initial) -> (Tensor, Tensor, Tensor)")
def _forward(backend: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Compute outputs, the last state and the states kept, [M, B, T/EVERY up, H, K, V].

    M, the models, is in front of every tensor.
    """
    q, _, v, *_, initial = inputs
    if not q.numel() or not v.numel():
        out, _, kept = _room(backend, *inputs)
        return out.zero_(), initial.clone(), kept.zero_()
    with without_autocast(q):
        return _kernels(backend, *inputs).forward(EVERY, *inputs)


@_forward.register_fake
def _room(
    backend: str, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    models, batch, time, heads, keys = q.shape
    kept = q.new_empty(models, batch, -(-time // EVERY), heads, keys, v.shape[-1])
    return v.new_empty(v.shape), initial.new_empty(initial.shape), kept


@custom_op(
    "cat_lm::decaying_scan_backward",
    f"({_INPUTS}, Tensor kept, Tensor grad, Tensor grad_last)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(backend: str, *given: Tensor) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, rate, a and the initial state."""
    *inputs, kept, grad, grad_last = given
    if not inputs[0].numel() or not inputs[2].numel():
        return *(s.new_zeros(s.shape) for s in inputs), grad_last.clone()
    with without_autocast(grad):
        kernels = _kernels(backend, *inputs, grad, grad_last)
        return kernels.backward(EVERY, kept, grad, grad_last, *inputs)


@_backward.register_fake
def _(backend: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(s.new_empty(s.shape) for s in (*tensors[:5], tensors[-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.backend, *tensors = inputs
    ctx.save_for_backward(*tensors[:5], output[2])


def _gradients(ctx: Any, grad: Tensor, grad_last: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return None, *_backward(ctx.backend, *ctx.saved_tensors, grad, grad_last)


_forward.register_autograd(_gradients, setup_context=_setup_context)


def _vmap_rule(operator: Any) -> Any:
    """Return torch.vmap's rule: its dimension is joined with the first, the models."""

    def run(info: Any, axes: tuple[Any, ...], backend: str, *tensors: Tensor) -> Any:
        size, pairs = info.batch_size, zip(tensors, axes[1:], strict=True)
        joined = (fold_vmap_axis(size, tensor, axis, 0) for tensor, axis in pairs)
        found = operator(backend, *joined)
        return tuple(s.unflatten(0, (size, -1)) for s in found), (0,) * len(found)

    return run


_forward.register_vmap(_vmap_rule(_forward))
_backward.register_vmap(_vmap_rule(_backward))
