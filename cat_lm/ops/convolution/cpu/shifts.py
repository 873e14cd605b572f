"""The convolution per channel as a sum of shifted inputs, where no C++ compiler is at hand.

    y[:, j:] += F[:, :, j] · x[:, :T−j]   for every lag j

in fp32 (fp64 for fp64), so that sums are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """y[b,t,h,d] = bias[h,d] + sum_j F[h,d,j] x[b,t−j,h,d]; x [B, T, H, D], filters [H, D, W]."""
    sums = torch.promote_types(x.dtype, torch.float32)
    x, taps, dtype = x.to(sums), filters.to(sums).permute(2, 0, 1).contiguous(), x.dtype
    y = x * taps[0]
    if bias is not None:
        y += bias
    for lag in range(1, min(taps.shape[0], x.shape[1])):
        y[:, lag:].addcmul_(_seen(x[:, :-lag], lag, positions), taps[lag])
    return y.to(dtype)


def input_gradient(dy: Tensor, filters: Tensor, positions: Tensor | None) -> Tensor:
    """dx[b,t,h,d] = sum_j F[h,d,j] dy[b,t+j,h,d]."""
    sums = torch.promote_types(dy.dtype, torch.float32)
    dy, taps, dtype = dy.to(sums), filters.to(sums).permute(2, 0, 1).contiguous(), dy.dtype
    dx = dy * taps[0]
    for lag in range(1, min(taps.shape[0], dy.shape[1])):
        dx[:, :-lag].addcmul_(_seen(dy[:, lag:], lag, positions), taps[lag])
    return dx.to(dtype)


def filter_gradient(dy: Tensor, x: Tensor, window: int, positions: Tensor | None) -> Tensor:
    """dF[h,d,j] = sum_{b,t} dy[b,t,h,d] x[b,t−j,h,d], summed in fp32 or wider: [H, D, W]."""
    sums = torch.promote_types(x.dtype, torch.float32)
    dy, x, time = dy.to(sums), x.to(sums), x.shape[1]
    gradient = x.new_zeros(window, *x.shape[2:])
    for lag in range(min(window, time)):
        pairs = dy[:, lag:] * _seen(x[:, : time - lag], lag, positions)
        gradient[lag] = pairs.sum(dim=(0, 1))
    return gradient.permute(1, 2, 0)


def _seen(values: Tensor, lag: int, positions: Tensor | None) -> Tensor:
    """Return what pairs of tokens `lag` apart exchange, [B, T−lag, H, D]: 0 across documents."""
    if positions is None or lag == 0:
        return values
    return torch.where((positions[:, lag:] >= lag)[:, :, None, None], values, 0.0)
