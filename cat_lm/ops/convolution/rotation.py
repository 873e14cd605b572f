"""Rotary positions on queries and keys, and what their angles must be."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution import triton


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, backend: str = "auto") -> Tensor:
    """Rotary positions on the first R channels of x [B, T, H, D], by halves (GPT-NeoX).

        y[r] = x[r] cos[r] − x[r + R/2] sin[r],   y[r + R/2] = x[r + R/2] cos[r + R/2] + x[r] sin[…]

    for r < R/2, with cosines and sines [B or 1, T, R]; the other channels pass. On a GPU it is one
    kernel each way, which rounds once and keeps nothing of x for the backward pass; the angles get
    no gradient of it.

    Args:
        backend: auto or triton for that kernel, where it can serve; torch's operators otherwise.
    """
    width = cosines.shape[-1]
    by_kernel = backend == "triton" or (backend == "auto" and x.device.type != "cpu")
    if by_kernel and width > 0 and triton.why_not(x.device, x.dtype) is None:
        return triton.rotate(x, cosines, sines)
    cosines, sines = cosines[:, :, None].to(x.dtype), sines[:, :, None].to(x.dtype)
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return torch.cat([turned, passed], dim=-1)


def check_rotary(
    rotary: tuple[Tensor, Tensor] | None, batch: int, time: int, head_dim: int
) -> None:
    """Check cosines and sines, [B or 1, T, R] each. Raises ValueError."""
    for angles in rotary or ():
        rotated = angles.shape[-1]
        rows = angles.shape[0] if angles.ndim == 3 else 0
        if rows not in (1, batch) or angles.shape[1] != time or rotated % 2 or rotated > head_dim:
            raise ValueError(
                f"rotary must be cosines and sines of [{batch} or 1, {time}, R] with R even and at "
                f"most {head_dim}, not {list(angles.shape)}"
            )
