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

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.signal import lfilter
from scipy.special import betaincc, ndtr, ndtri

from eval.recall.theory.claims import Claim, Verdict

LENGTH = 2**20
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
RANKS = (4, 16, 64)
NECESSARY = ((20, 0.1, 2.2), (20, 0.5, 2.2), (60, 0.1, 3.0), (60, 0.05, 4.0), (200, 0.1, 5.0))
_CELLS = 2**22  # how many numbers are drawn at once

Law = Callable[[Any, float], float]  # the simulated quantity, and the function t -> d/σ²


def largest_normal(rng: np.random.Generator, count: float, trials: int) -> np.ndarray:
    """The largest of `count` standard normals, [trials]: Φ⁻¹ of that of uniforms, U^{1/count}."""
    if count < 1:
        return np.full(trials, -np.inf)
    return -ndtri(-np.expm1(np.log(rng.random(trials)) / count))


def fixed_thresholds(
    block: int, trials: int, seed: int, *, length: float = LENGTH, local: bool = True
) -> np.ndarray:
    """Least d/σ² for success with one fixed query, [trials].

    Args:
        local: whether the copy must also win inside the blocks.
    """
    rng = np.random.default_rng([seed, block, 1])
    rivals = largest_normal(rng, length / block - 2, trials)
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
        snr_squared: SNR², of any shape; SNR is not negative.
        rivals: m, how many other blocks there are to choose from; as the shape of `snr_squared`.
    """
    snr, rivals = np.broadcast_arrays(np.sqrt(np.asarray(snr_squared, float)), rivals)
    z = np.linspace(-8, 8, 161)
    weight = np.exp(-(z**2) / 2)
    above = ndtr(-(snr[..., None] + math.sqrt(block - 1) * z) / math.sqrt(block))
    fewer = betaincc(top_k, np.maximum(rivals - top_k + 1, 1)[..., None], above)
    return np.where(rivals < top_k, 1.0, (fewer * weight).sum(axis=-1) / weight.sum())


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
        # Number of tokens from the copy to the end of its block.
        back = rng.integers(0, block, count)
        noise = spread * rng.standard_normal((count, blocks))
        # The copy stands in place of one of its block's random tokens.
        left = 1 - decay ** (2 * back) / spread**2
        noise[rows, target] *= np.sqrt(np.maximum(left, 0))
        state = lfilter([1.0], [1.0, -math.exp(-rate)], noise, axis=1)
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


def sufficient(block: int, width: float = 0.0, t: float = 0.0) -> float:
    """d/σ² of Propositions 1 and 5: 2B(√log L̄ + ω + t)².

    Args:
        width: ω: 0 for a fixed query, √r for a subspace, a set's Gaussian width.
    """
    return 2 * block * (math.sqrt(math.log(LENGTH / block)) + width + t) ** 2


def bands(trials: int, slow_trials: int, seed: int = 0) -> dict[str, list[dict[str, float]]]:
    """d at 10% and 50% success by block size, for the figure: series -> points."""
    series = {"fixed query": lambda block: fixed_thresholds(block, trials, seed)}
    for rank in RANKS:
        series[f"uniform, dim(S) = {rank}"] = lambda block, rank=rank: subspace_thresholds(
            block, rank, slow_trials, seed
        )
    series["exponential filter"] = lambda block: exponential_thresholds(block, slow_trials, seed)
    return {name: [_band(block, draw(block)) for block in BLOCKS] for name, draw in series.items()}


def _band(block: int, thresholds: np.ndarray) -> dict[str, float]:
    low, half = np.quantile(thresholds, [0.1, 0.5])
    return {"block": block, "d10": float(low), "d50": float(half), "trials": len(thresholds)}


def formula_curves() -> dict[str, list[tuple[int, float]]]:
    """Proposition 1's curves at t = 0 for the figure: label -> (B, d)."""
    widths = {"fixed query": 0.0} | {f"uniform, dim(S) = {r}": math.sqrt(r) for r in RANKS}
    return {name: [(b, sufficient(b, width)) for b in BLOCKS] for name, width in widths.items()}


def propositions(trials: int, slow_trials: int, seed: int = 0) -> list[Claim]:
    """Check Propositions 1 and 2, and that each check refuses a wrong law.

    Args:
        trials: number of trials of the laws for a fixed query.
        slow_trials: number of trials of the other laws.
    """
    return [
        _sufficiency(trials, seed),
        _necessity(trials, seed),
        _sharpness(trials, seed),
        _uniform(slow_trials, seed),
        _exponential(slow_trials, seed),
    ]


def chance(t: float) -> float:
    """The probability that Propositions 1 and 2 promise."""
    return 1 - 3 * math.exp(-(t**2) / 4)


def _check_promised(thresholds: Mapping[Any, np.ndarray], law: Law, at: Sequence[float]) -> Verdict:
    """The least success at what a law says, by t, against what is promised."""
    success = {
        t: min(float((v <= law(key, t)).mean()) for key, v in thresholds.items()) for t in at
    }
    said = ", ".join(
        f"t={t:g}: {100 * got:.2f}% (≥ {100 * chance(t):.1f}%)" for t, got in success.items()
    )
    return Verdict(said, all(got >= chance(t) for t, got in success.items()))


def _sufficiency(trials: int, seed: int) -> Claim:
    thresholds = {b: fixed_thresholds(b, trials, seed) for b in BLOCKS}
    return Claim(
        "Proposition 1 (A)",
        "d ≥ 2σ²B(√log L̄ + t)² solves recall with probability at least 1 − 3e^{−t²/4}",
        f"L = 2^20, B = {min(thresholds)}…{max(thresholds)}, {trials} trials each; least "
        "success over B",
        lambda law: _check_promised(thresholds, law, (2.2, 2.5, 3.0, 4.0)),
        lambda block, t: sufficient(block, t=t),
        {
            "without the factor B": lambda block, t: sufficient(block, t=t) / block,
            "a tenth of that d": lambda block, t: sufficient(block, t=t) / 10,
        },
        "The query's block competes with L̄ − 2 others; the argmax must be over earlier blocks "
        "(j < ⌈i/B⌉) for the layer to be causal, and the local phase needs keys of its own: with "
        "the length-B sum filter it would not compare single tokens.",
    )


def _necessity(trials: int, seed: int) -> Claim:
    def check(sign: int) -> Verdict:
        said, passes = [], True
        for power, epsilon, t in NECESSARY:
            fails = []
            for block in BLOCKS:
                root = math.sqrt((1 - sign * epsilon) * (power * math.log(2) - math.log(block)))
                if root >= t:
                    v = fixed_thresholds(block, trials, seed, length=2.0**power)
                    fails.append(float((v > 2 * block * (root - sign * t) ** 2).mean()))
            if fails:
                passes &= min(fails) >= chance(t)
                said.append(f"(2^{power}, {epsilon}, {t:g}): {100 * min(fails):.2f}%")
                said[-1] += f" (≥ {100 * chance(t):.1f}%)"
        return Verdict("fail at (L, ε, t) = " + ", ".join(said), passes)

    return Claim(
        "Proposition 1 (B)",
        "d ≤ 2σ²B(√((1−ε) log L̄) − t)² fails with probability at least 1 − 3e^{−t²/4}",
        f"B = {min(BLOCKS)}…{max(BLOCKS)}, {trials} trials each; least failure "
        "over those B with √((1−ε) log L̄) ≥ t",
        check,
        1,
        {"beyond the threshold, d = 2σ²B(√((1+ε) log L̄) + t)²": -1},
        "Needs √((1−ε) log L̄) ≥ t, which is not said: the square hides the root's sign.",
    )


def _sharpness(trials: int, seed: int) -> Claim:
    blocks, powers = (8, 32, 512), (20, 40, 80, 160, 320)
    half = {
        (b, p): float(np.median(fixed_thresholds(b, trials, seed, length=2.0**p)))
        for b, p in itertools.product(blocks, powers)
    }

    def check(law: Callable[[int, float], float]) -> Verdict:
        """`law`: d/σ² from B and log L̄."""
        said, passes = [], True
        for block in blocks:
            logs = [power * math.log(2) - math.log(block) for power in powers]
            ratios = [half[block, p] / law(block, x) for p, x in zip(powers, logs, strict=True)]
            passes &= ratios == sorted(set(ratios)) and 0.95 < ratios[-1] < 1.05
            said.append(f"B={block}: " + ", ".join(f"{ratio:.3f}" for ratio in ratios))
        return Verdict("; ".join(said), passes)

    return Claim(
        "Proposition 1, threshold",
        "success if and only if d / (2σ²B log L̄) ≥ 1 + o(1)",
        f"d at 50% success over 2B log L̄, L = {', '.join(f'2^{p}' for p in powers)}; {trials} "
        "trials; must rise to within 5% of 1",
        check,
        lambda block, log: 2 * block * log,
        {
            "without the factor 2": lambda block, log: block * log,
            "√log L̄ for log L̄": lambda block, log: 2 * block * math.sqrt(log),
            "without the factor B": lambda _, log: 2 * log,
        },
        "The limit is approached slowly: at L = 2^20 half of the trials succeed some 20% below.",
    )


def _uniform(trials: int, seed: int) -> Claim:
    blocks, ranks = (32, 128, 512), (1, *RANKS)
    found = {
        (r, b): subspace_thresholds(b, r, trials, seed) for r, b in itertools.product(ranks, blocks)
    }
    halves = ", ".join(
        f"r={r}: {np.median(found[r, 32]):.0f} ({sufficient(32, math.sqrt(r)):.0f})" for r in ranks
    )
    return Claim(
        "Proposition 1 (C)",
        "d ≥ 2σ²B(√log L̄ + √dim(S) + t)² solves recall for all queries of a subspace S, with "
        "probability at least 1 − 3e^{−t²/4}",
        f"r = dim(S) = {', '.join(map(str, ranks))}, B = {', '.join(map(str, blocks))}, {trials} "
        f"trials each; least success; d at 50% (formula at t = 0), B = 32: {halves}",
        lambda law: _check_promised(found, law, (2.5, 3.0, 4.0)),
        lambda of, t: sufficient(of[1], math.sqrt(of[0]), t),
        {"without √dim(S)": lambda of, t: sufficient(of[1], t=t)},
    )


def _exponential(trials: int, seed: int) -> Claim:
    blocks = (32, 128, 512)

    def law(block: int, t: float) -> float:
        return 50 * block * (math.sqrt(math.log(LENGTH / block)) + t) ** 2

    def check(rate: float) -> Verdict:
        found = {b: exponential_thresholds(b, trials, seed, rate=rate) for b in blocks}
        measured, passes = _check_promised(found, law, (2.2, 2.5, 3.0))
        halves = ", ".join(f"B={b} {law(b, 0) / np.median(v):.2g}" for b, v in found.items())
        return Verdict(f"{measured}; 50B log L̄ over d at 50%: {halves}", passes)

    return Claim(
        "Proposition 2",
        "with F_i = e^{−i/B}, d ≥ 50σ²B(√log L̄ + t)² succeeds with probability ≥ 1 − 3e^{−t²/4}",
        f"B = {', '.join(map(str, blocks))}, {trials} trials each; least success over B",
        check,
        1.0,
        {"F_i = e^{−20i/B}, which forgets within its block": 20.0},
        "The statement lacks σ². The constant is far from tight.",
    )
