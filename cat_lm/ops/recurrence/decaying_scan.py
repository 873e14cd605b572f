"""The scan of a state that decays, for Mamba and gated linear attention.

    S_t = exp(r_t ⊙ a) ⊙ S_{t−1} + k_t v_t^T,   o_t = S_t^T q_t

One step at a time, so that only decays are raised to powers, never their inverses: nothing can
overflow where r ⊙ a ≤ 0, however long or strong the decay. A step's state is changed in place and
is not kept: the backward pass is written out, and makes the states of EVERY steps again from the
one before them. In fp32 a C++ kernel does both on a CPU (decaying_scan_cpu.py) and Triton kernels
on a GPU (decaying_scan_triton.py); for other tensors, on a CPU without a compiler and on a GPU
without Triton, plain torch does (decaying_scan_torch.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.recurrence import decaying_scan_torch
from cat_lm.ops.recurrence.decaying_scan_cpu import load_kernel
from cat_lm.ops.runtime.triton_launch import INSTALLED

if INSTALLED:
    from cat_lm.ops.recurrence import decaying_scan_triton

EVERY = 16  # steps between states that are kept


def decaying_scan(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> Tensor:
    """o [B, T, H, V] of the recurrence above.

    It may be differentiated once, and batched with torch.func.vmap.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        rate: r, [B, T, H, K or 1, V or 1].
        a: [H or 1, K or 1, V or 1].

    Raises:
        ValueError: other shapes.
    """
    _check(q, k, v, rate, a)
    return _Scan.apply(*(s[None] for s in (q, k, v, rate, a)))[0].squeeze(0)


def _check(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> None:
    state = (*q.shape[2:], *v.shape[3:])  # H, K, V
    fits = len(state) == 3 and k.shape == q.shape and v.shape[:3] == q.shape[:3]
    fits = fits and rate.dim() == 5 and rate.shape[:3] == q.shape[:3] and a.dim() == 3
    for sizes, most in ((rate.shape[3:], state[1:]), (a.shape, state)):
        fits = fits and all(n in (1, m) for n, m in zip(sizes, most, strict=True))
    if not fits:
        shapes = ", ".join(str(list(s.shape)) for s in (q, k, v, rate, a))
        raise ValueError(f"q, k, v, rate and a do not fit each other: {shapes}")


def _kernels(*tensors: Tensor) -> Any:
    """What computes the scan of these tensors, both ways."""
    kinds = {(s.device, s.dtype) for s in tensors}
    device, dtype = kinds.pop()
    if not kinds and dtype == torch.float32:
        if device.type == "cpu":
            return load_kernel() or decaying_scan_torch
        if device.type == "cuda" and INSTALLED:
            return decaying_scan_triton
    return decaying_scan_torch


@torch.library.custom_op("cat_lm::decaying_scan", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the states kept, [M, B, T/EVERY up, H, K, V]; M, the models, is in front."""
    if not q.numel() or not v.numel():
        return tuple(s.zero_() for s in _room(q, k, v, rate, a))
    return _kernels(q, k, v, rate, a).forward(EVERY, q, k, v, rate, a)


@_forward.register_fake
def _room(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    models, batch, time, heads, keys = q.shape
    kept = q.new_empty(models, batch, -(-time // EVERY), heads, keys, v.shape[-1])
    return v.new_empty(v.shape), kept


@torch.library.custom_op("cat_lm::decaying_scan_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor, kept: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, rate and a."""
    inputs = (q, k, v, rate, a)
    if not q.numel() or not v.numel():
        return tuple(s.new_zeros(s.shape) for s in inputs)
    return _kernels(*inputs, grad).backward(EVERY, kept, grad, *inputs)


@_backward.register_fake
def _(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(s.new_empty(s.shape) for s in tensors[:5])


def _fold(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The mapped dimension joined with the first, the models."""
    size = info.batch_size
    moved = (
        s.expand(size, *s.shape) if dim is None else s.movedim(dim, 0)
        for s, dim in zip(tensors, in_dims, strict=True)
    )
    return [s.flatten(0, 1) for s in moved]


def _unfold(info: Any, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    split = tuple(s.unflatten(0, (info.batch_size, -1)) for s in tensors)
    return split, (0,) * len(split)


class _Scan(torch.autograd.Function):
    """`_forward` with its gradients."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, ...]:
        return _ScanBackward.apply(*ctx.saved_tensors, grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
        return _unfold(info, _Scan.apply(*_fold(info, in_dims, tensors)))


class _ScanBackward(torch.autograd.Function):
    """`_backward`; itself not differentiable."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return _backward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
        return _unfold(info, _ScanBackward.apply(*_fold(info, in_dims, tensors)))
