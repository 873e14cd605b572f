"""A kind of convolution of one's own, `model.conv_type: neighbour`.

A head's first tap reads the head itself, its others the head n before it, in a circle:

    y[b,t,h,:] = F[h,0] x[b,t,h,:] + sum over 1 <= j < W of F[h,j] x[b,t−j,h−n,:]

with n from `model.conv_options: {distance: n}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.ops.convolution.kinds import Kind, register

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Options:
    """What `model.conv_options` can give."""

    distance: int = 1


def add_lag(taps: Tensor, lag: int, delayed: Tensor, options: Options) -> Tensor:
    """Return one lag's part of the sum: taps [H, W], delayed x [B, T, H, D]."""
    read = delayed.roll(options.distance, dims=2) if lag else delayed
    return taps[:, lag, None] * read


MEANING = "one filter for each head and the one before"
register(Kind("neighbour", ("H", "W"), add_lag, MEANING, Options=Options))
