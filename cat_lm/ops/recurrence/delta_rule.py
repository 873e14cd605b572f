"""The (gated) delta rule, whole sequences at once.

    S_t = α_t S_{t−1} (I − β_t k_t k_t^T) + β_t v_t k_t^T,   o_t = S_t q_t / √d_k

With u_t = β_t (v_t − α_t S_{t−1} k_t) and Γ_ts = α_{s+1} … α_t, this is the triangular system
(I + strictly lower(β_t Γ_ts k_t·k_s)) u = β v and o_t = Σ_{s≤t} Γ_ts (q_t·k_s) u_s / √d_k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None
) -> Tensor:
    """o [B, T, H, V] for q, k [B, T, H, K], v [B, T, H, V], β and log α [B, T, H]."""
    q, k, v = (s.transpose(1, 2) for s in (q * q.shape[-1] ** -0.5, k, v))
    beta = beta.transpose(1, 2)[..., None]
    products, scores = k @ k.transpose(2, 3), q @ k.transpose(2, 3)
    if log_decay is not None:
        total = log_decay.transpose(1, 2).cumsum(dim=2)
        between = total[..., :, None] - total[..., None, :]
        time = torch.arange(between.shape[-1], device=q.device)
        between = between.masked_fill(time[:, None] < time, -torch.inf).exp()
        products, scores = products * between, scores * between
    system = (beta * products).tril(-1)
    u = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
    return (scores.tril() @ u).transpose(1, 2)
