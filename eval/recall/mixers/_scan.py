"""The scan of a state that decays, for Mamba and gated linear attention.

    S_t = exp(r_t ⊙ a) ⊙ S_{t−1} + k_t v_t^T,   o_t = S_t^T q_t

One step at a time, so that only decays are raised to powers, never their inverses: nothing can
overflow where r ⊙ a ≤ 0, however long or strong the decay. A step's state is changed in place and
is not kept: the backward pass is written out, and makes the states of EVERY steps again from the
one before them. On a CPU in fp32 a C++ kernel does both (_scan_cpu.py); elsewhere, and without a
compiler, plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eval.recall.mixers._scan_cpu import kernel_for

EVERY = 16  # steps between states that are kept


def decaying_scan(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> Tensor:
    """o [B, T, H, V] of the recurrence above.

    It may be differentiated once, and batched with torch.func.vmap.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        rate: r, [B, T, H, K or 1, V or 1].
        a: [H or 1, K or 1, V or 1].
    """
    return _Scan.apply(*(s[None] for s in (q, k, v, rate, a)))[0].squeeze(0)


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


def _step(state: Tensor, decay: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """decay ⊙ S + k v^T, in `out`."""
    return torch.mul(state, decay, out=out).addcmul_(k[..., :, None], v[..., None, :])


def _read(state: Tensor, q: Tensor) -> Tensor:
    """S^T q."""
    return (q[..., None, :] @ state)[..., 0, :]


def _write(state: Tensor, v: Tensor) -> Tensor:
    """S v; this order of factors is three times as fast as the other."""
    return (v[..., None, :] @ state.mT)[..., 0, :]


def _forward(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [M, B, T, H, V] and kept states [M, B, T/EVERY up, H, K, V]."""
    a = a[:, None].contiguous()
    state, outputs, kept = q.new_zeros(*q.shape[:2], *q.shape[3:], v.shape[-1]), [], []
    decay = torch.empty_like(rate[:, :, 0] * a)
    for t in range(q.shape[2]):
        if t % EVERY == 0:
            kept.append(state.clone())
        decay = torch.mul(rate[:, :, t], a, out=decay).exp_()
        _step(state, decay, k[:, :, t], v[:, :, t], out=state)
        outputs.append(_read(state, q[:, :, t]))
    return torch.stack(outputs, dim=2), torch.stack(kept, dim=2)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor, kept: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, rate and a."""
    a, steps = a[:, None].contiguous(), q.shape[2]
    flow, product = torch.zeros_like(kept[:, :, 0]), torch.empty_like(kept[:, :, 0])  # ∂/∂S_t
    da = torch.zeros_like(rate[:, :, 0] * a)
    states = kept.new_empty(EVERY + 1, *flow.shape)
    decays = kept.new_empty(EVERY, *da.shape)
    found: tuple[list[Tensor], ...] = ([], [], [], [])
    for start in reversed(range(0, steps, EVERY)):
        states[0] = kept[:, :, start // EVERY]
        times = range(start, min(start + EVERY, steps))
        for i, t in enumerate(times):
            torch.mul(rate[:, :, t], a, out=decays[i]).exp_()
            _step(states[i], decays[i], k[:, :, t], v[:, :, t], out=states[i + 1])
        for i, t in reversed(list(enumerate(times))):
            flow.addcmul_(q[:, :, t, ..., None], grad[:, :, t, ..., None, :])
            found[0].append(_write(states[i + 1], grad[:, :, t]))
            found[1].append(_write(flow, v[:, :, t]))
            found[2].append(_read(flow, k[:, :, t]))
            flow.mul_(decays[i])
            torch.mul(flow, states[i], out=product)
            exponent = product.sum_to_size(da.shape)  # ∂/∂(r_t ⊙ a)
            da.addcmul_(exponent, rate[:, :, t])
            # Not in place: where nothing is summed, `exponent` is the shared `product`.
            found[3].append((exponent * a).sum_to_size(rate[:, :, t].shape))
    dq, dk, dv, drate = (torch.stack(s[::-1], dim=2) for s in found)
    return dq, dk, dv, drate, da.sum_to_size(a.shape)[:, 0]


class _Scan(torch.autograd.Function):
    """Forward; all tensors have the models M in front. Also gives the states kept."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        kernel = kernel_for(q, k, v, rate, a)
        return kernel.forward(EVERY, q, k, v, rate, a) if kernel else _forward(q, k, v, rate, a)

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
    """Gradients of q, k, v, rate and a; itself not differentiable."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor, kept: Tensor, grad: Tensor
    ) -> tuple[Tensor, ...]:
        kernel = kernel_for(q, k, v, rate, a, grad)
        if kernel:
            return kernel.backward(EVERY, kept, grad, q, k, v, rate, a)
        return _backward(q, k, v, rate, a, kept, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
        return _unfold(info, _ScanBackward.apply(*_fold(info, in_dims, tensors)))
