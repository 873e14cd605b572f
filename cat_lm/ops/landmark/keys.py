"""Landmarks: one key for each complete block, a filter's sum of the block's own keys.

    K̄_j = sum_{w<b} F[w] k_{e−w},     e the last token of block j,

which is the causal convolution of the keys with F (CAT, section 5), read at the ends of blocks.
`box` is F = 1/b, `exponential` F[w] = ρ^w / sum_{w<b} ρ^w with ρ = e^{−1/b}, which goes on beyond
the block: K̄_j also has e^{−1} K̄_{j−1} of the same document. Of filters as long as the text
(`cat_lm.ops.long_filter`) a state goes from block to block, with z_m = e^{−rate + i angle}:

    K̄_j = d k_e + Re sum_m c_m S_{j,m},     S_{j,m} = sum_{w<b} z_m^w k_{e−w} + z_m^b S_{j−1,m}
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.long_filter.chunks import decay_factors
from cat_lm.ops.long_filter.filters import Modes
from cat_lm.ops.runtime.precision import without_autocast

# Maps states and a number of blocks to the states decayed over them.
Fade = Callable[[Tensor, int], Tensor]


def block_weights(name: str, block: int) -> Tensor:
    """Return F of `box` or `exponential`, [1, b], lag 0 first, in double precision."""
    if name == "box":
        return torch.full((1, block), 1 / block, dtype=torch.float64)
    weights = torch.exp(-torch.arange(block, dtype=torch.float64) / block)
    return (weights / weights.sum())[None]


def initial_parameters(
    filter_name: str, block: int, key_heads: int, heads: int, width: int, sharp: bool
) -> dict[str, Tensor]:
    """Return a layer's parameters as they start: the filter as the box, and θ = ln(D) / 2.

    Args:
        key_heads, heads: of keys, which have filters, and of queries, which have θ.
        width: D.
        sharp: whether there is a θ, see `cat_lm.ops.landmark.options.is_sharp`.
    """
    values = {}
    if filter_name == "learned":
        weights = block_weights("box", block).to(torch.get_default_dtype())
        values["filter"] = weights.expand(key_heads, -1).clone()
    if sharp:
        values["sharpness"] = torch.full((heads,), 0.5 * math.log(width))
    return values


def landmark_keys(
    key: Tensor, weights: Tensor | Modes, layout: BlockLayout, carries: bool = False
) -> Tensor:
    """Make the landmarks of all complete blocks.

    Args:
        key: [B, H, S, D].
        weights: F [1 or H, b], lag 0 first; or filters of H heads as long as the text, whose dtype
            sums and states have.
        carries: whether e^{−1} of the landmark before goes into the next one of its document.

    Returns:
        [B, H, n, D], zeros where a row has fewer blocks.
    """
    is_there = (layout.numbers >= 0)[:, None, :, None]

    def carry(sums: Tensor, fade: Fade | None) -> Tensor:
        return carry_over(sums * is_there, layout.numbers, fade)

    landmarks, _ = _summarise_blocks(layout.blocks_of(key), weights, carries, carry)
    return landmarks * is_there if isinstance(weights, Modes) else landmarks


def next_landmarks(
    blocks: Tensor, weights: Tensor | Modes, carries: bool, before: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Make the landmarks of blocks [B, H, m, b, D] that follow each other, as `landmark_keys`.

    Args:
        before: the state after the blocks before them, [B, H, D] or [B, H, K·D]; None at the
            beginning.

    Returns:
        The landmarks, and the state with which the next go on; None where none does.
    """

    def carry(sums: Tensor, fade: Fade | None) -> Tensor:
        if before is not None:
            sums = torch.cat([before[:, :, None], sums], dim=2)
        numbers = torch.arange(sums.shape[2], device=sums.device)[None]
        return carry_over(sums, numbers, fade)[:, :, 0 if before is None else 1 :]

    landmarks, states = _summarise_blocks(blocks, weights, carries, carry)
    return landmarks, None if states is None else states[:, :, -1]


def _summarise_blocks(
    blocks: Tensor,
    weights: Tensor | Modes,
    carries: bool,
    carry: Callable[[Tensor, Fade | None], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Return the landmarks of blocks [B, H, n, b, D], and the states that go on, if any."""
    if not isinstance(weights, Modes):
        states = carry(weighted_sums(blocks, weights), _fade_by_e if carries else None)
        return states, states if carries else None
    with without_autocast(blocks):
        exact = blocks.to(weights.rate.dtype)
        sums = _own_states(exact, weights).flatten(3)
        states = carry(sums, _state_decay(weights, blocks.shape[3]))
        return _read_landmarks(states, exact, weights).to(blocks.dtype), states


def weighted_sums(blocks: Tensor, weights: Tensor) -> Tensor:
    """Sum blocks [B, H, n, b, D] with weights [1 or H, b], lag 0 first: [B, H, n, D]."""
    weights = weights.flip(1).to(blocks.dtype).expand(blocks.shape[1], -1)
    return (weights[:, None, None] @ blocks).squeeze(-2)


def carry_over(sums: Tensor, numbers: Tensor, fade: Fade | None) -> Tensor:
    """K̄_j = S_j + fade(K̄_{j−1}, 1) within documents, of S [B, H, n, D] and block numbers [R, n].

    By doubling: after a pass a landmark holds twice as many blocks before it.

    Args:
        fade: what is left after so many blocks, linear and fade(fade(x, m), n) = fade(x, m + n);
            nothing if it is None.
    """
    reach = 1
    while fade is not None and reach < sums.shape[2]:
        follows = (numbers[:, reach:] >= reach)[:, None, :, None]
        earlier = fade(sums[:, :, :-reach] * follows, reach)
        sums = torch.cat([sums[:, :, :reach], sums[:, :, reach:] + earlier], dim=2)
        reach *= 2
    return sums


def _fade_by_e(states: Tensor, blocks: int) -> Tensor:
    return states * math.exp(-blocks)


def _own_states(blocks: Tensor, modes: Modes) -> Tensor:
    """Return the contributions of blocks [B, H, n, b, D] to the state, [B, H, n, K, D]."""
    lags = torch.arange(blocks.shape[3] - 1, -1, -1, device=blocks.device)
    cosines, sines = decay_factors(modes, lags)
    weights = cosines if sines is None else torch.cat([cosines, sines], dim=1)
    return torch.einsum("hkw,bhnwd->bhnkd", weights, blocks)


def _state_decay(modes: Modes, block: int) -> Fade:
    """Return a function that decays states [B, H, n, K·D] over a number of blocks."""

    def fade(states: Tensor, blocks: int) -> Tensor:
        lag = torch.tensor([block * blocks], device=states.device)
        cosine, sine = decay_factors(modes, lag)  # [H, M, 1]
        cosine = cosine[:, None]
        if sine is None:
            return (cosine * states.unflatten(3, (cosine.shape[2], -1))).flatten(3)
        sine, states = sine[:, None], states.unflatten(3, (2 * cosine.shape[2], -1))
        real, imaginary = states.chunk(2, dim=3)
        turned = [cosine * real - sine * imaginary, sine * real + cosine * imaginary]
        return torch.cat(turned, dim=3).flatten(3)

    return fade


def _read_landmarks(states: Tensor, blocks: Tensor, modes: Modes) -> Tensor:
    """Return the landmarks of states [B, H, n, K·D] and blocks [B, H, n, b, D]."""
    weights = modes.real
    if modes.imaginary is not None:
        weights = torch.cat([weights, -modes.imaginary], dim=1)
    states = states.unflatten(3, (weights.shape[1], -1))
    sums = torch.einsum("hk,bhnkd->bhnd", weights, states)
    return sums + modes.now[:, None, None] * blocks[:, :, :, -1]
