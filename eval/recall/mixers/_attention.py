"""Softmax and linear attention over [B, T, H, D], and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention, [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return y.transpose(1, 2)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-12) -> Tensor:
    """o_t = Σ_{s≤t} (q_t·k_s) v_s / Σ_{s≤t} q_t·k_s for feature maps q, k [B, T, H, F].

    Quadratic in T, exact, for any feature map with positive products.
    """
    scores = torch.einsum("bthf,bshf->bhts", q, k).tril()
    y = torch.einsum("bhts,bshd->bthd", scores, v)
    return y / (scores.sum(dim=-1).transpose(1, 2)[..., None] + eps)


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary positions on all channels of x [B, T, H, D], halves rotated together."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
