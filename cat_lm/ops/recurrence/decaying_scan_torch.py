"""The scan of decaying_scan.py in plain torch, on any device and in any precision.

A step's [M, B, H, K, V] is changed in place, where a CPU's cache can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _step(state: Tensor, decay: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """decay ⊙ S + k v^T, in `out`."""
    return torch.mul(state, decay, out=out).addcmul_(k[..., :, None], v[..., None, :])


def _read(state: Tensor, q: Tensor) -> Tensor:
    """S^T q."""
    return (q[..., None, :] @ state)[..., 0, :]


def _write(state: Tensor, v: Tensor) -> Tensor:
    """S v; this order of factors is three times as fast as the other."""
    return (v[..., None, :] @ state.mT)[..., 0, :]


def forward(
    every: int, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, a: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute outputs [M, B, T, H, V], the last state [M, B, H, K, V] and the kept ones
    [M, B, T/every up, H, K, V], from the state `initial` on.
    """
    a = a[:, None].contiguous()
    state, outputs, kept = initial.clone(memory_format=torch.contiguous_format), [], []
    decay = torch.empty_like(rate[:, :, 0] * a)
    for t in range(q.shape[2]):
        if t % every == 0:
            kept.append(state.clone())
        decay = torch.mul(rate[:, :, t], a, out=decay).exp_()
        _step(state, decay, k[:, :, t], v[:, :, t], out=state)
        outputs.append(_read(state, q[:, :, t]))
    return torch.stack(outputs, dim=2), state, torch.stack(kept, dim=2)


def backward(
    every: int,
    kept: Tensor,
    grad: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    a: Tensor,
) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, rate, a and the initial state."""
    a, steps = a[:, None].contiguous(), q.shape[2]
    flow = grad_last.clone(memory_format=torch.contiguous_format)  # ∂/∂S_t
    product = torch.empty_like(flow)
    da = torch.zeros_like(rate[:, :, 0] * a)
    states = kept.new_empty(every + 1, *flow.shape)
    decays = kept.new_empty(every, *da.shape)
    found: tuple[list[Tensor], ...] = ([], [], [], [])
    for start in reversed(range(0, steps, every)):
        states[0] = kept[:, :, start // every]
        times = range(start, min(start + every, steps))
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
    return dq, dk, dv, drate, da.sum_to_size(a.shape)[:, 0], flow
