"""Causal convolutions along time by loops, in double precision and differentiable by autograd.

A filter for each head and for each pair of heads: CAT, Definition 1, and MH-CAT, section 3.1. A
filter for each channel: Primer (So et al., 2021). Inputs before the row, and those of another
document, are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What one lag adds to the heads [H, D] of a token: filters, lag and the earlier token's heads.
ADDED = {
    "head": lambda filters, lag, past: filters[:, lag, None] * past,
    "depthwise": lambda filters, lag, past: filters[:, :, lag] * past,
    "multihead": lambda filters, lag, past: filters[lag] @ past,
}
WINDOW_AXIS = {"head": 1, "depthwise": 2, "multihead": 0}


def convolve(
    kind: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Return y[b,t] = bias + Σ_j F_j x[b,t−j] of x [B, T, H, D]; `documents` are ids [B, T]."""
    rows = []
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            total = torch.zeros_like(x[row, t]) if bias is None else bias
            for lag in range(min(filters.shape[WINDOW_AXIS[kind]], t + 1)):
                if documents is not None and documents[row, t - lag] != documents[row, t]:
                    break
                total = total + ADDED[kind](filters, lag, x[row, t - lag])
            rows.append(total)
    return torch.stack(rows).view(x.shape)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return x [B, T, H, D] whose channels r and r + R/2 are rotated (Su et al., 2021; GPT-NeoX).

    Cosines and sines are [B or 1, T, R]; channels beyond R pass.
    """
    cosines, sines = (angles.expand(x.shape[0], -1, -1) for angles in (cosines, sines))
    channels, half = list(x.unbind(-1)), cosines.shape[-1] // 2
    for r in range(half):
        first, second = x[..., r], x[..., r + half]
        cos, sin = (angles[:, :, None] for angles in (cosines, sines))
        channels[r] = first * cos[..., r] - second * sin[..., r]
        channels[r + half] = second * cos[..., r + half] + first * sin[..., r + half]
    return torch.stack(channels, dim=-1)
