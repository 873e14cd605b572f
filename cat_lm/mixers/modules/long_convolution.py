"""Causal convolutions as long as the sequence, by FFT, as Hyena and H3 are published.

A transform's rounding mixes all positions: what comes later moves earlier outputs by some 1e-7 of
the largest. CAT's long filters (`cat_lm.ops.long_filter`) are therefore computed without one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.mixers.modules.context import at_least_fp32


def long_convolution(x: Tensor, filters: Tensor) -> Tensor:
    """Compute y_t = Σ_{s≤t} f_{t−s} x_s along dimension 1, in fp32 at least.

    Args:
        x: [B, T, …].
        filters: [T, …], lag 0 first, to be broadcast over the batch and over ones.
    """
    time = x.shape[1]
    size = 2 * time  # no lag wraps around
    spectrum = torch.fft.rfft(at_least_fp32(filters), n=size, dim=0)
    product = torch.fft.rfft(at_least_fp32(x), n=size, dim=1) * spectrum
    return torch.fft.irfft(product, n=size, dim=1)[:, :time].to(x.dtype)
