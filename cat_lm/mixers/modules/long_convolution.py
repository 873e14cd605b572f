"""Causal convolutions as long as the sequence, by FFT."""

from __future__ import annotations

import torch
from torch import Tensor


def long_convolution(x: Tensor, filters: Tensor) -> Tensor:
    """y_t = Σ_{s≤t} f_{t−s} x_s along dimension 1.

    Args:
        x: [B, T, …].
        filters: [T, …], lag 0 first, to be broadcast over the batch and over ones.
    """
    time = x.shape[1]
    size = 2 * time  # no lag wraps around
    product = torch.fft.rfft(x, n=size, dim=1) * torch.fft.rfft(filters, n=size, dim=0)
    return torch.fft.irfft(product, n=size, dim=1)[:, :time]
