"""Landmarks by filters as long as the text (`cat_lm.ops.long_filter`), of N numbers a head.

    K̄_j = sum_{w≤e} F_w k_{e−w} = d k_e + Re sum_m c_m S_{j,m},     e the last token of block j,
    S_{j,m} = sum_{w<b} z_m^w k_{e−w} + z_m^b S_{j−1,m},            z_m = e^{−rate + i angle},

within documents: a block's own keys make K = N numbers a channel, and a state goes from block to
block. This is `long_conv` of the keys, read at the ends of blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cat_lm.ops.landmark.keys import carried
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.long_filter.chunks import powers
from cat_lm.ops.long_filter.filters import Modes
from cat_lm.ops.runtime.precision import without_autocast


def long_landmark_keys(key: Tensor, modes: Modes, layout: BlockLayout) -> Tensor:
    """Make the landmarks of all complete blocks.

    Args:
        key: [B, H, S, D].
        modes: the filters of H heads; sums and states have their dtype.

    Returns:
        [B, H, n, D], zeros where a row has fewer blocks.
    """
    is_there = (layout.numbers >= 0)[:, None, :, None]
    with without_autocast(key):
        blocks = layout.blocks_of(key).to(modes.rate.dtype)
        sums = _own_states(blocks, modes).flatten(3) * is_there
        states = carried(sums, layout.numbers, _fading(modes, layout.block))
        return (_read(states, blocks, modes) * is_there).to(key.dtype)


def next_long_landmarks(
    blocks: Tensor, modes: Modes, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Make the landmarks of blocks [B, H, m, b, D] that follow each other, m ≥ 1.

    Args:
        before: the state after the blocks before them, [B, H, K·D]; None at the beginning.

    Returns:
        The landmarks [B, H, m, D], and the state after the blocks.
    """
    dtype = blocks.dtype
    with without_autocast(blocks):
        blocks = blocks.to(modes.rate.dtype)
        sums = _own_states(blocks, modes).flatten(3)
        first = 0 if before is None else 1
        if before is not None:
            sums = torch.cat([before[:, :, None], sums], dim=2)
        numbers = torch.arange(sums.shape[2], device=sums.device)[None]
        states = carried(sums, numbers, _fading(modes, blocks.shape[3]))[:, :, first:]
        return _read(states, blocks, modes).to(dtype), states[:, :, -1]


def _own_states(blocks: Tensor, modes: Modes) -> Tensor:
    """Return what blocks [B, H, n, b, D] themselves make of a state, [B, H, n, K, D]."""
    lags = torch.arange(blocks.shape[3] - 1, -1, -1, device=blocks.device)
    cosines, sines = powers(modes, lags)
    weights = cosines if sines is None else torch.cat([cosines, sines], dim=1)
    return torch.einsum("hkw,bhnwd->bhnkd", weights, blocks)


def _fading(modes: Modes, block: int) -> Callable[[Tensor, int], Tensor]:
    """Make what is left of states [B, H, n, K·D] after so many blocks."""

    def fade(states: Tensor, blocks: int) -> Tensor:
        lag = torch.tensor([block * blocks], device=states.device)
        cosine, sine = powers(modes, lag)  # [H, M, 1]
        cosine = cosine[:, None]
        if sine is None:
            return (cosine * states.unflatten(3, (cosine.shape[2], -1))).flatten(3)
        sine, states = sine[:, None], states.unflatten(3, (2 * cosine.shape[2], -1))
        real, imaginary = states.chunk(2, dim=3)
        turned = [cosine * real - sine * imaginary, sine * real + cosine * imaginary]
        return torch.cat(turned, dim=3).flatten(3)

    return fade


def _read(states: Tensor, blocks: Tensor, modes: Modes) -> Tensor:
    """The landmarks of states [B, H, n, K·D] and blocks [B, H, n, b, D]."""
    weights = modes.real
    if modes.imaginary is not None:
        weights = torch.cat([weights, -modes.imaginary], dim=1)
    states = states.unflatten(3, (weights.shape[1], -1))
    sums = torch.einsum("hk,bhnkd->bhnd", weights, states)
    return sums + modes.now[:, None, None] * blocks[:, :, :, -1]
