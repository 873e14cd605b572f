"""Recurrences a step at a time, in double precision and differentiable by autograd.

A document begins with a state of zeros, except the first of a row, which may be given one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _starts(documents: Tensor | None, row: int, t: int) -> bool:
    return documents is not None and t > 0 and documents[row, t] != documents[row, t - 1]


def decaying_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    a: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] and the last state [B, H, K, V] (Mamba, algorithm 2; GLA, equation 3).

    S_t = exp(r_t ⊙ a) ⊙ S_{t−1} + k_t v_tᵀ and o_t = S_tᵀ q_t.
    """
    outputs, last = [], []
    for row in range(len(q)):
        held = v.new_zeros(q.shape[2], q.shape[3], v.shape[3]) if state is None else state[row]
        for t in range(q.shape[1]):
            held = torch.zeros_like(held) if _starts(documents, row, t) else held
            held = (rate[row, t] * a).exp() * held + k[row, t, :, :, None] * v[row, t, :, None]
            outputs.append((held * q[row, t, :, :, None]).sum(1))
        last.append(held)
    return torch.stack(outputs).view(v.shape), torch.stack(last)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o and the last state (DeltaNet, Yang et al., 2024; gated: Yang et al., 2025, eq. 10).

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ and o_t = S_t q_t / √d_k; states are
    returned with their keys first, [B, H, K, V].
    """
    outputs, last = [], []
    for row in range(len(q)):
        held = v.new_zeros(q.shape[2], q.shape[3], v.shape[3]) if state is None else state[row]
        for t in range(q.shape[1]):
            held = torch.zeros_like(held) if _starts(documents, row, t) else held
            if log_decay is not None:
                held = log_decay[row, t].exp()[:, None, None] * held
            key, step = k[row, t, :, :, None], beta[row, t, :, None, None]
            read = (held * key).sum(1, keepdim=True)  # S k, [H, 1, V]
            held = held + step * key * (v[row, t, :, None] - read)
            outputs.append((held * q[row, t, :, :, None]).sum(1) / q.shape[3] ** 0.5)
        last.append(held)
    return torch.stack(outputs).view(v.shape), torch.stack(last)
