"""Propositions 1 (A), (B), (C) and 2 at L = 2^20, each law beside one that is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from eval.recall.theory import landmark
from eval.recall.theory.claims import Claim, Verdict
from eval.recall.theory.landmark import LENGTH, sufficient

Law = Callable[[int, float], float]  # B and t -> d/σ²
NECESSARY = ((20, 0.1, 2.2), (20, 0.5, 2.2), (60, 0.1, 3.0), (60, 0.05, 4.0), (200, 0.1, 5.0))


def propositions(trials: int, slow_trials: int, seed: int = 0) -> list[Claim]:
    """All rows.

    Args:
        trials: of the laws for a fixed query; slow_trials: of the others.
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


def _sufficiency(trials: int, seed: int) -> Claim:
    thresholds = {b: landmark.fixed_thresholds(b, trials, seed) for b in landmark.BLOCKS}

    def check(law: Law) -> Verdict:
        results = {
            t: min(float((v <= law(b, t)).mean()) for b, v in thresholds.items())
            for t in (2.2, 2.5, 3.0, 4.0)
        }
        return _promised(results)

    return Claim.judged(
        "Proposition 1 (A)",
        "d ≥ 2σ²B(√log L̄ + t)² solves recall with probability at least 1 − 3e^{−t²/4}",
        f"L = 2^20, B = {min(thresholds)}…{max(thresholds)}, {trials} trials each; least "
        "success over B",
        check,
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
            for block in landmark.BLOCKS:
                root = math.sqrt((1 - sign * epsilon) * (power * math.log(2) - math.log(block)))
                if root < t:
                    continue
                d = 2 * block * (root - sign * t) ** 2
                v = landmark.fixed_thresholds(block, trials, seed, length=2.0**power)
                fails.append(float((v > d).mean()))
            if not fails:
                continue
            passes &= min(fails) >= chance(t)
            said.append(f"(2^{power}, {epsilon}, {t:g}): {100 * min(fails):.2f}%")
            said[-1] += f" (≥ {100 * chance(t):.1f}%)"
        return Verdict("fail at (L, ε, t) = " + ", ".join(said), passes)

    return Claim.judged(
        "Proposition 1 (B)",
        "d ≤ 2σ²B(√((1−ε) log L̄) − t)² fails with probability at least 1 − 3e^{−t²/4}",
        f"B = {min(landmark.BLOCKS)}…{max(landmark.BLOCKS)}, {trials} trials each; least failure "
        "over those B with √((1−ε) log L̄) ≥ t",
        check,
        1,
        {"beyond the threshold, d = 2σ²B(√((1+ε) log L̄) + t)²": -1},
        "Needs √((1−ε) log L̄) ≥ t, which is not said: the square hides the root's sign.",
    )


def _sharpness(trials: int, seed: int) -> Claim:
    blocks, powers = (8, 32, 512), (20, 40, 80, 160, 320)
    half = {
        (block, power): float(
            np.median(landmark.fixed_thresholds(block, trials, seed, length=2.0**power))
        )
        for block in blocks
        for power in powers
    }

    def check(law: Callable[[int, float], float]) -> Verdict:
        """`law`: d/σ² from B and log L̄."""
        said, passes = [], True
        for block in blocks:
            logs = [power * math.log(2) - math.log(block) for power in powers]
            ratios = [half[block, p] / law(block, x) for p, x in zip(powers, logs, strict=True)]
            rises = all(a < b for a, b in itertools.pairwise(ratios))
            passes &= rises and 0.95 < ratios[-1] < 1.05
            said.append(f"B={block}: " + ", ".join(f"{ratio:.3f}" for ratio in ratios))
        return Verdict("; ".join(said), passes)

    return Claim.judged(
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
    blocks, ranks = (32, 128, 512), (1, *landmark.RANKS)
    found = {
        (r, b): landmark.subspace_thresholds(b, r, trials, seed) for r in ranks for b in blocks
    }

    def check(law: Callable[[int, int, float], float]) -> Verdict:
        results = {
            t: min(float((v <= law(b, r, t)).mean()) for (r, b), v in found.items())
            for t in (2.5, 3.0, 4.0)
        }
        return _promised(results)

    halves = ", ".join(
        f"r={r}: {np.median(found[r, 32]):.0f} ({sufficient(32, math.sqrt(r)):.0f})" for r in ranks
    )
    return Claim.judged(
        "Proposition 1 (C)",
        "d ≥ 2σ²B(√log L̄ + √dim(S) + t)² solves recall for all queries of a subspace S, with "
        "probability at least 1 − 3e^{−t²/4}",
        f"r = dim(S) = {', '.join(map(str, ranks))}, B = {', '.join(map(str, blocks))}, {trials} "
        f"trials each; least success; d at 50% (formula at t = 0), B = 32: {halves}",
        check,
        lambda block, rank, t: sufficient(block, math.sqrt(rank), t),
        {"without √dim(S)": lambda block, _, t: sufficient(block, t=t)},
    )


def _exponential(trials: int, seed: int) -> Claim:
    blocks = (32, 128, 512)

    def check(rate: float) -> Verdict:
        found = {b: landmark.exponential_thresholds(b, trials, seed, rate=rate) for b in blocks}
        results = {
            t: min(
                float((v <= 50 * b * (math.sqrt(math.log(LENGTH / b)) + t) ** 2).mean())
                for b, v in found.items()
            )
            for t in (2.2, 2.5, 3.0)
        }
        verdict = _promised(results)
        halves = ", ".join(
            f"B={b} {50 * b * math.log(LENGTH / b) / np.median(v):.2g}" for b, v in found.items()
        )
        return Verdict(f"{verdict.measured}; 50B log L̄ over d at 50%: {halves}", verdict.passes)

    return Claim.judged(
        "Proposition 2",
        "with F_i = e^{−i/B}, d ≥ 50σ²B(√log L̄ + t)² succeeds with probability ≥ 1 − 3e^{−t²/4}",
        f"B = {', '.join(map(str, blocks))}, {trials} trials each; least success over B",
        check,
        1.0,
        {"F_i = e^{−20i/B}, which forgets within its block": 20.0},
        "The statement lacks σ². The constant is far from tight.",
    )


def _promised(results: dict[float, float]) -> Verdict:
    """Success by t, against what is promised."""
    said = ", ".join(
        f"t={t:g}: {100 * got:.2f}% (≥ {100 * chance(t):.1f}%)" for t, got in results.items()
    )
    return Verdict(said, all(got >= chance(t) for t, got in results.items()))
