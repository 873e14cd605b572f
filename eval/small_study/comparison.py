"""Means, spreads over seeds, and which differences are larger than they.

The rule. All models see the same batches under the same seed, so two models are compared seed by
seed: d_s = loss of one minus loss of the other. With the mean d over n seeds,

    within spread   |d| is at most the pooled standard deviation over seeds of the two models,
                    sqrt((s_a^2 + s_b^2) / 2)
    unclear         beyond that, but the paired 95% interval d ± t(n-1) s_d / sqrt(n) holds 0
    lower, higher   beyond that, and the interval does not hold 0

With three seeds t is 4.30, so only differences that repeat in every seed are called lower or
higher. Intervals are of one comparison each; nothing is corrected for making several.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

# The 0.975 quantile of Student's t for 1, 2, … degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
MAX_SEEDS = len(T_QUANTILES) + 1

WITHIN, UNCLEAR, LOWER, HIGHER = "within spread", "unclear", "lower", "higher"
ONE_SEED = "one seed"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Mean and standard deviation (n - 1) over seeds; the deviation of one seed is None."""

    mean: float
    sd: float | None
    n: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """One model's loss minus another's, paired by seed.

    Attributes:
        mean: over the seeds that both have.
        spread: pooled standard deviation over seeds of the two models; None for one seed.
        low, high: the paired 95% interval; None for one seed.
        verdict: one of the words above.
    """

    mean: float
    spread: float | None
    low: float | None
    high: float | None
    n: int
    verdict: str


def summarise(values: Sequence[float]) -> Summary:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Summary(statistics.fmean(values), sd, len(values))


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """The loss of `a` minus the loss of `b`, by the rule above; None without a common seed.

    Args:
        a, b: seed -> loss; at most `MAX_SEEDS` common seeds.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    differences = [a[seed] - b[seed] for seed in seeds]
    mean, n = statistics.fmean(differences), len(seeds)
    if n == 1:
        return Difference(mean, None, None, None, 1, ONE_SEED)
    variances = [statistics.variance([side[seed] for seed in seeds]) for side in (a, b)]
    spread = math.sqrt(sum(variances) / 2)
    half = T_QUANTILES[n - 2] * statistics.stdev(differences) / math.sqrt(n)
    low, high = mean - half, mean + half
    return Difference(mean, spread, low, high, n, _verdict(mean, spread, low, high))


def _verdict(mean: float, spread: float, low: float, high: float) -> str:
    if abs(mean) <= spread:
        return WITHIN
    if low <= 0 <= high:
        return UNCLEAR
    return LOWER if mean < 0 else HIGHER
