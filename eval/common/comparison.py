"""Means, spreads over seeds, and which differences an interval carries.

The rule. All models see the same batches under the same seed, so two models are compared seed by
seed: d_s = value of one minus value of the other. With the mean d over n seeds and m comparisons
that are made together,

    lower, higher   the interval d ± t(n-1, 1 - 0.025/m) e leaves out 0
    unclear         it holds 0, or a value or error of those is not finite: no interval then

where e^2 = s_d^2 / n, plus the squared standard error of d over the documents that were scored
where these are known. The division by m is Bonferroni's: the chance that any of the m words is
wrong is at most 5%. Seeds and documents are both samples; adding their variances counts what they
share twice, which errs on the wide side, as does the t of the seeds alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

UNCLEAR, LOWER, HIGHER = "unclear", "lower", "higher"
ONE_SEED = "one seed"
LEVEL = 0.05  # chance of a wrong word among all comparisons made together


@dataclasses.dataclass(frozen=True)
class Summary:
    """Mean and standard deviation (n - 1) over seeds; the deviation of one seed is None."""

    mean: float
    sd: float | None
    n: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """One model's value minus another's, paired by seed.

    Attributes:
        mean: over the seeds that both have.
        spread: pooled standard deviation over seeds of the two models; None without interval.
        low, high: the paired interval, corrected for the comparisons; None where there is none.
        comparisons: made together, which the interval is corrected for.
        seed_error, document_error: standard errors of the mean over seeds and over documents;
            None where there is no interval, or the documents are not known.
        verdict: one of the words above.
    """

    mean: float
    spread: float | None
    low: float | None
    high: float | None
    n: int
    verdict: str
    comparisons: int = 1
    seed_error: float | None = None
    document_error: float | None = None


def summarise(values: Sequence[float]) -> Summary:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Summary(statistics.fmean(values), sd, len(values))


def compare(
    a: Mapping[int, float],
    b: Mapping[int, float],
    comparisons: int = 1,
    document_error: float | None = None,
) -> Difference | None:
    """The value of `a` minus the value of `b`, by the rule above; None without a common seed.

    Args:
        a, b: seed -> value, such as a loss in nats per token.
        comparisons: made together, 1 or more.
        document_error: standard error of the mean difference over documents, see `ratio_error`.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    differences = [a[seed] - b[seed] for seed in seeds]
    is_finite = all(map(math.isfinite, differences))
    mean, n = statistics.fmean(differences) if is_finite else math.nan, len(seeds)
    if n == 1 or not is_finite or not math.isfinite(document_error or 0.0):
        word = ONE_SEED if n == 1 else UNCLEAR
        return Difference(mean, None, None, None, n, word, comparisons, None, document_error)
    variances = [statistics.variance([side[seed] for seed in seeds]) for side in (a, b)]
    spread = math.sqrt(sum(variances) / 2)
    seed_error = statistics.stdev(differences) / math.sqrt(n)
    half = t_quantile(1 - LEVEL / 2 / comparisons, n - 1)
    half *= math.hypot(seed_error, document_error or 0.0)
    low, high = mean - half, mean + half
    verdict = UNCLEAR if low <= 0 <= high else LOWER if mean < 0 else HIGHER
    return Difference(mean, spread, low, high, n, verdict, comparisons, seed_error, document_error)


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float:
    """The standard error of sum(sums) / sum(counts) when G groups are a sample of many.

    Linearised: sqrt(G / (G-1) * sum (s_g - m n_g)^2) / sum n_g, with m the ratio; nan for one
    group, and for sums that are not finite.
    """
    groups, total = len(sums), math.fsum(counts)
    if groups < 2 or not all(map(math.isfinite, sums)):
        return math.nan
    mean = math.fsum(sums) / total
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(groups / (groups - 1) * squares) / total


def t_quantile(probability: float, df: int) -> float:
    """Student's t: the value that is not exceeded with `probability`, from 0.5 to below 1."""
    low, high = 0.0, 1.0
    while _t_within(high, df) < 2 * probability - 1:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if _t_within(middle, df) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _t_within(t: float, df: int) -> float:
    """P(|T| < t) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(df))
    cosine = math.cos(angle)
    odd = df % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
