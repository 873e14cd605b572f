"""A kind of convolution of one's own, `model.conv_type: neighbour`.

A head's first tap reads the head itself, its others the head before it:

    y[b,t,h,:] = F[h,0] x[b,t,h,:] + sum over 1 <= j < W of F[h,j] x[b,t−j,h−1,:]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.ops.convolution.kinds import Kind, register

if TYPE_CHECKING:
    from torch import Tensor


def add_lag(taps: Tensor, lag: int, delayed: Tensor) -> Tensor:
    """Give one lag's part of the sum: taps [H, W], delayed x [B, T, H, D]."""
    read = delayed.roll(1, dims=2) if lag else delayed
    return taps[:, lag, None] * read


register(Kind("neighbour", ("H", "W"), add_lag, "one filter for each head and the one before"))
