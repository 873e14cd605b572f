"""Propositions 1 and 2: how large d must be for landmark attention to find the right block.

L = 2^20 tokens in blocks of B; landmarks are the keys' sum over a block (or an exponential
average); the query has unit length and one earlier copy, all other tokens are N(0, σ²/d). Only
inner products with the query matter, so nothing of size L·d is made: the laws below are exact, but
that the search in the blocks is drawn apart from the search among them. All noise scales as 1/√d,
so each trial has a threshold, the least d at which it succeeds, and the d of p% success is a
quantile of thresholds.

    fixed query    1 + √((B−1)/d) z > √(B/d) max of L̄−2 normals
    subspace       max_i ‖√(B/d) n_i − √((B−1)/d) n_β‖ < 1,  n in R^r  (all unit queries of R^r)
    exponential    g_i = e^{−1} g_{i−1} + ε_i; the copy raises block i ≥ β by e^{−(p+i−β)}

and the copy must win inside the two blocks: the largest of 2B−2 tokens' products is below 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

LENGTH = 2**20
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
RANKS = (4, 16, 64)
_CELLS = 2**22  # numbers drawn at once


def largest_normal(
    rng: np.random.Generator, count: float, trials: int, rank: int = 1
) -> np.ndarray:
    """The `rank`-th largest of `count` standard normals, [trials]: Φ⁻¹ of that of uniforms.

    The largest of uniforms is U^{1/count}; what lies above the k-th is Beta(k, count − k + 1).
    """
    if rank > count:
        return np.full(trials, -np.inf)
    if rank == 1:
        tail = -np.expm1(np.log(rng.random(trials)) / count)
    else:
        tail = rng.beta(rank, count - rank + 1, trials)
    return -torch.special.ndtri(torch.from_numpy(tail)).numpy()


def fixed_thresholds(
    block: int,
    trials: int,
    seed: int,
    *,
    length: float = LENGTH,
    local: bool = True,
    top_k: int = 1,
) -> np.ndarray:
    """Least d/σ² for success with one fixed query, [trials].

    Args:
        local: whether the copy must also win inside the blocks.
        top_k: how many blocks are chosen, among which the copy's must be.
    """
    rng = np.random.default_rng([seed, block, 1])
    rivals = largest_normal(rng, length / block - 2, trials, top_k)
    needed = math.sqrt(block) * rivals - math.sqrt(block - 1) * rng.standard_normal(trials)
    needed = np.maximum(needed, 0)
    if local:
        needed = np.maximum(needed, largest_normal(rng, 2 * block - 2, trials))
    return needed**2


def retrieval(
    snr_squared: np.ndarray | float, block: int, rivals: np.ndarray | float, top_k: int
) -> np.ndarray:
    """The chance that the landmark of a match's block is among the k highest.

    Proposition 1's law for a fixed query, with SNR² = (q·k_match − E q·k)² / Var q·k in the place
    of d/σ² and k blocks chosen. Of m other blocks fewer than k must exceed the match's, whose own
    noise z is that of its other B − 1 keys:

        E_z P(Binomial(m, Φ(−x)) < k),     x = (SNR + √(B−1) z) / √B

    Args:
        snr_squared: of any shape; SNR is not negative.
        rivals: m, how many other blocks there are to choose from; as the shape of `snr_squared`.
    """
    snr, rivals = np.broadcast_arrays(
        np.sqrt(np.asarray(snr_squared, dtype=float)), np.asarray(rivals, dtype=float)
    )
    z = np.linspace(-8, 8, 161)
    weight = np.exp(-(z**2) / 2)
    x = (snr[..., None] + math.sqrt(block - 1) * z) / math.sqrt(block)
    tail = torch.from_numpy(x)
    above = torch.special.log_ndtr(-tail).numpy()[..., None]
    below = torch.special.log_ndtr(tail).numpy()[..., None]
    count = rivals[..., None, None]
    i = np.arange(top_k)
    choose = _log_factorial(count) - _log_factorial(i) - _log_factorial(np.maximum(count - i, 0))
    with np.errstate(over="ignore"):
        chances = np.exp(choose + i * above + np.maximum(count - i, 0) * below)
    chance = (np.where(i <= count, chances, 0.0).sum(axis=-1) * weight).sum(axis=-1) / weight.sum()
    return np.where(rivals < top_k, 1.0, np.minimum(chance, 1.0))


def _log_factorial(x: np.ndarray) -> np.ndarray:
    return torch.lgamma(torch.from_numpy(np.asarray(x, dtype=float) + 1)).numpy()


def set_thresholds(
    support: Callable[[np.ndarray], np.ndarray], rank: int, block: int, trials: int, seed: int
) -> np.ndarray:
    """Least d/σ² for success with every query of a set S of unit vectors, [trials].

    Every comparison of a query with a token or landmark is a support function: S succeeds if
    h_S(√(B/d) n_i − √((B−1)/d) n_β) < 1 for all blocks i, n in R^r, and within the blocks.

    Args:
        support: h_S(x) = sup of ⟨x, β⟩ over β in S, from [..., r] to [...].
        rank: r, dimensions of the space that S spans.
    """
    rng = np.random.default_rng([seed, block, rank, 4])
    found = np.empty(trials)
    for trial in range(trials):
        own = math.sqrt(block - 1) * rng.standard_normal(rank)
        rivals = math.sqrt(block) * rng.standard_normal((LENGTH // block - 2, rank)) - own
        local = rng.standard_normal((2 * block - 2, rank))
        found[trial] = max(support(rivals).max(), support(local).max(), 0)
    return found**2


def subspace_thresholds(block: int, rank: int, trials: int, seed: int) -> np.ndarray:
    """Least d/σ² for success with every unit query of an r-dimensional subspace, [trials].

    Along n_β a block's component is normal, across it chi-square with r−1 degrees of freedom.
    """
    rng = np.random.default_rng([seed, block, rank, 2])
    rivals = LENGTH // block - 2
    own = math.sqrt(block - 1) * np.sqrt(rng.chisquare(rank, trials))
    found = np.empty(trials)
    for trial in range(trials):
        along = math.sqrt(block) * rng.standard_normal(rivals) - own[trial]
        across = 2 * block * rng.standard_gamma((rank - 1) / 2, rivals) if rank > 1 else 0.0
        local = rng.chisquare(rank, 2 * block - 2).max()
        found[trial] = max((along**2 + across).max(), local)
    return found


def exponential_thresholds(
    block: int, trials: int, seed: int, *, local: bool = True, rate: float = 1.0
) -> np.ndarray:
    """Least d/σ² with landmarks that average exponentially; fixed query, [trials].

    Args:
        rate: ρ = e^{−rate/B}; the proposition's is 1.
    """
    rng = np.random.default_rng([seed, block, 3])
    blocks, decay = LENGTH // block - 1, math.exp(-rate / block)
    spread = math.sqrt((1 - decay ** (2 * block)) / (1 - decay**2))
    found = []
    for start in range(0, trials, max(1, _CELLS // blocks)):
        count = min(max(1, _CELLS // blocks), trials - start)
        rows, target = np.arange(count), rng.integers(0, blocks, count)
        back = rng.integers(0, block, count)  # tokens from the copy to its block's end
        noise = spread * rng.standard_normal((count, blocks))
        # The copy stands in place of one of its block's random tokens.
        left = 1 - decay ** (2 * back) / spread**2
        noise[rows, target] *= np.sqrt(np.maximum(left, 0))
        state = _decaying_sum(noise, rate)
        after = np.arange(blocks) - target[:, None]
        means = np.where(
            after >= 0, np.exp(-rate * (back[:, None] / block + np.maximum(after, 0))), 0
        )
        ahead = means[rows, target][:, None] - means
        ahead[rows, target] = np.inf
        needed = ((state - state[rows, target][:, None]) / ahead).max(axis=1)
        found.append(np.maximum(needed, 0))
    needed = np.concatenate(found)
    if local:
        needed = np.maximum(needed, largest_normal(rng, 2 * block - 2, trials))
    return needed**2


def _decaying_sum(noise: np.ndarray, rate: float) -> np.ndarray:
    """g_i = e^{−rate} g_{i−1} + ε_i along rows, by doubling; 64 blocks back is e^{−64 rate}."""
    state, step = noise.copy(), 1
    while step <= 32:
        shifted = math.exp(-rate * step) * state[:, :-step]
        state[:, step:] += shifted
        step *= 2
    return state


def sufficient(block: int, width: float = 0.0, t: float = 0.0) -> float:
    """d/σ² of Propositions 1 and 5: 2B(√log L̄ + ω + t)².

    Args:
        width: ω: 0 for a fixed query, √r for a subspace, a set's Gaussian width.
    """
    return 2 * block * (math.sqrt(math.log(LENGTH / block)) + width + t) ** 2


def bands(trials: int, slow_trials: int, seed: int = 0) -> dict[str, list[dict[str, float]]]:
    """d at 10% and 50% success by block size, for the figure: series -> points."""
    series = {"fixed query": [_band(b, fixed_thresholds(b, trials, seed)) for b in BLOCKS]}
    for rank in RANKS:
        series[f"uniform, dim(S) = {rank}"] = [
            _band(b, subspace_thresholds(b, rank, slow_trials, seed)) for b in BLOCKS
        ]
    series["exponential filter"] = [
        _band(b, exponential_thresholds(b, slow_trials, seed)) for b in BLOCKS
    ]
    return series


def _band(block: int, thresholds: np.ndarray) -> dict[str, float]:
    low, half = np.quantile(thresholds, [0.1, 0.5])
    return {"block": block, "d10": float(low), "d50": float(half), "trials": len(thresholds)}


def formula_curves(ranks: Sequence[int] = RANKS) -> dict[str, list[tuple[int, float]]]:
    """Proposition 1's curves at t = 0 for the figure: label -> (B, d)."""
    curves = {"fixed query": [(b, sufficient(b)) for b in BLOCKS]}
    for rank in ranks:
        curves[f"uniform, dim(S) = {rank}"] = [(b, sufficient(b, math.sqrt(rank))) for b in BLOCKS]
    return curves
