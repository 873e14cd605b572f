"""Means, spreads over seeds, and which differences are significant.

The rule. All models see the same batches under the same seed, so two models are compared seed by
seed: d_s = value of one minus value of the other. With the mean d over n seeds, D documents that
were scored, and m comparisons that are made together,

    lower, higher   the interval d ± h leaves out 0
    unclear         it holds 0; or there is none, because a run of either model diverged, or a value
                    or an error is not finite: the seeds that are left would be a choice; or all
                    seeds differ by the same, 0 or not, as values of few digits can, and the error
                    over documents is not known: no error of 0

where h^2 = (t(n-1) s)^2 + (t(D-1) r)^2: s is the standard error of d over seeds, r that over
documents (left out where these are not known), t(k) Student's quantile at 1 - 0.025/m with k
degrees of freedom. The division by m is Bonferroni's: the chance that any of the m words is wrong
is at most 5%. It errs on the wide side: each error times its own quantile covers normal errors at
least as often as said, whatever the share of each (Banerjee, 1960, Sankhyā 22, 357); what seeds and
documents share is counted in both; and m words are seldom all near their bounds. On the narrow side
errs r, which is linearised: a little, where few documents are of very different length. And all of
it takes the seeds to scatter about one value: where a model finds a task in some runs and not in
others, a few seeds may all be of one kind, and s then says nothing of the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.lab.places import CONTROL, NEGATIVE

Line = dict[str, Any]  # See `frame`.

UNCLEAR, LOWER, HIGHER = "unclear", "lower", "higher"
ONE_SEED = "one seed"
# Standard errors below this fraction of the values count as zero: they come from rounding k/n.
_ROUNDING = 1e-12
LEVEL = 0.05  # The family-wise error rate of all comparisons made together.


@dataclasses.dataclass(frozen=True)
class Difference:
    """One model's value minus another's, paired by seed.

    Attributes:
        mean: over the seeds that both have; nan where none is left.
        spread: pooled standard deviation over seeds of the two models; None without interval.
        low, high: the paired interval, corrected for the comparisons; None where there is none.
        n: seeds that the mean is over.
        comparisons: number of comparisons made together, for which the interval is corrected.
        seed_error, document_error: standard errors of the mean over seeds and over documents;
            None where there is no interval, or the documents are not known.
        documents: that the second is over; None where they are not known.
        lost: seeds of which a side has no finite value; with any there is no interval.
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
    documents: int | None = None
    lost: int = 0


def compare(
    a: Mapping[int, float],
    b: Mapping[int, float],
    comparisons: int = 1,
    document_error: float | None = None,
    documents: int | None = None,
) -> Difference | None:
    """Return `b` minus `a` by the rule above; None without a common seed.

    Args:
        a, b: seed -> value, such as a loss in nats per token; one that is not finite is lost.
        comparisons: number of comparisons made together, at least 1.
        document_error: standard error of the mean difference over documents, see `ratio_error`.
        documents: number of documents that this error is over.

    Raises:
        ValueError: an error over documents, and not of how many.
    """
    if document_error is not None and documents is None:
        raise ValueError("document_error: needs the number of documents")
    lost = {seed for side in (a, b) for seed, value in side.items() if not math.isfinite(value)}
    seeds = sorted((a.keys() & b.keys()) - lost)
    if not seeds and not lost:
        return None
    differences = [a[seed] - b[seed] for seed in seeds]
    mean, n = statistics.fmean(differences) if seeds else math.nan, len(seeds)
    known = {"document_error": document_error, "documents": documents, "lost": len(lost)}
    if lost or n == 1 or not _is_usable(document_error, documents):
        word = ONE_SEED if n == 1 and not lost else UNCLEAR
        return Difference(mean, None, None, None, n, word, comparisons, **known)
    variances = [statistics.variance([side[seed] for seed in seeds]) for side in (a, b)]
    spread = math.sqrt(sum(variances) / 2)
    seed_error = statistics.stdev(differences) / math.sqrt(n)
    largest = max(abs(side[seed]) for side in (a, b) for seed in seeds)
    if seed_error <= _ROUNDING * largest and document_error is None:
        return Difference(mean, None, None, None, n, UNCLEAR, comparisons, **known)
    half = half_width(seed_error, n, document_error, documents, comparisons)
    low, high = mean - half, mean + half
    verdict = UNCLEAR if low <= 0 <= high else LOWER if mean < 0 else HIGHER
    return Difference(mean, spread, low, high, n, verdict, comparisons, seed_error, **known)


def half_width(
    seed_error: float,
    seeds: int,
    document_error: float | None,
    documents: int | None,
    comparisons: int,
) -> float:
    """Return half the width of the rule's confidence interval.

    Args:
        seed_error, document_error: standard errors of the mean difference; the second may be None.
        seeds, documents: how many each is over, 2 or more.
        comparisons: number of comparisons made together.
    """
    level = 1 - LEVEL / 2 / comparisons
    half = t_quantile(level, seeds - 1) * seed_error
    if document_error is None or documents is None:
        return half
    return math.hypot(half, t_quantile(level, documents - 1) * document_error)


def _is_usable(document_error: float | None, documents: int | None) -> bool:
    """Return True if the standard error over documents can be used, or is not needed."""
    if document_error is None or documents is None:
        return True
    return documents > 1 and math.isfinite(document_error)


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Return the standard error of sum(sums) / sum(counts) for G groups sampled from many.

    Linearised: sqrt(G / (G-1) * sum (s_g - m n_g)^2) / sum n_g, with m the ratio; nan for one
    group, and for sums that are not finite.
    """
    groups, total = len(sums), math.fsum(counts)
    if groups < 2 or not all(map(math.isfinite, sums)):
        return math.nan
    mean = math.fsum(sums) / total
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(groups / (groups - 1) * squares) / total


@functools.cache
def t_quantile(probability: float, df: int) -> float:
    """Return the quantile of Student's t at `probability`."""
    from scipy.special import stdtrit  # Importing it takes half a second.

    return float(stdtrit(df, probability))


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A comparison: the sum of some lines' values minus that of as many others, seed by seed.

    Attributes:
        row, column, x: where reports show it.
        name: such as "k - q".
        plus, minus: the lines to add, and those to take away.
        family: contrasts of one are corrected for each other.
    """

    row: str
    column: str
    x: int | None
    name: str
    plus: tuple[Line, ...]
    minus: tuple[Line, ...]
    family: str = ""


def difference_of(one: Line, other: Line) -> Contrast:
    """Return the contrast of two lines of a panel."""
    name = f"{one['line']} - {other['line']}"
    return Contrast(one["row"], one["column"], one["x"], name, (one,), (other,))


def compare_pairs(lines: Iterable[Line], pairs: Sequence[tuple[str, str]]) -> list[Contrast]:
    """Return the contrasts of pairs of lines, by name, in each panel and x that has both."""
    return [
        difference_of(panel[a], panel[b])
        for panel in _by_panel(lines)
        for a, b in pairs
        if {a, b} <= panel.keys()
    ]


def first_minus_others(
    lines: Sequence[Line], more: Sequence[tuple[str, str]] = ()
) -> list[Contrast]:
    """Return each panel's first model minus every other at every x, controls left out.

    Args:
        more: pairs of lines to compare too, where a panel has both.
    """
    shown = [line for line in lines if line["row"] != CONTROL and line["line"] != NEGATIVE]
    found = []
    for panel in _by_panel(shown):
        first, *others = panel
        pairs = [(first, other) for other in others]
        pairs += [pair for pair in more if pair not in pairs]
        found += compare_pairs(panel.values(), pairs)
    return found


def _by_panel(lines: Iterable[Line]) -> list[dict[str, Line]]:
    """Return for each panel and x its lines by name."""
    panels: dict[tuple, dict[str, Line]] = {}
    for line in lines:
        panels.setdefault((line["row"], line["column"], line["x"]), {})[line["line"]] = line
    return list(panels.values())


def compute(contrasts: Sequence[Contrast], *, by_row: bool = False) -> list[dict[str, Any]]:
    """Compute contrasts as records store them; those without a common seed are omitted.

    Intervals are corrected for the number of all that are made together: of the contrast's family
    in the report, or, with `by_row`, in its row.
    """
    made = Counter((one.family, by_row and one.row) for one in contrasts)
    found = []
    for one in contrasts:
        sums = [_sums(side) for side in (one.plus, one.minus)]
        error, documents = _document_error(one)
        together = made[one.family, by_row and one.row]
        difference = compare(*sums, together, error, documents)
        if difference is not None and difference.verdict != ONE_SEED:
            place = {"row": one.row, "column": one.column, "x": one.x, "contrast": one.name}
            found.append(place | dataclasses.asdict(difference))
    return found


def _sums(lines: Sequence[Line]) -> dict[int, float]:
    seeds = set.intersection(*(set(line["runs"]) for line in lines))
    return {int(seed): math.fsum(_finite(line["runs"][seed]) for line in lines) for seed in seeds}


def _finite(value: float | None) -> float:
    return math.nan if value is None else value


def _document_error(contrast: Contrast) -> tuple[float | None, int | None]:
    """Return the standard error over documents, and their number; None where they are not known."""
    lines = [(line, 1) for line in contrast.plus] + [(line, -1) for line in contrast.minus]
    if any("documents" not in line for line, _ in lines):
        return None, None
    tokens = lines[0][0]["documents"]["tokens"]
    seeds = sorted(set.intersection(*(set(line["runs"]) for line, _ in lines)))
    if len(tokens) < 2 or not seeds:
        return None, None
    sums = [0.0] * len(tokens)
    for seed, (line, sign) in itertools.product(seeds, lines):
        if (of_documents := line["documents"]["nats"].get(seed)) is None:  # The model diverged.
            return None, None
        for number, nats in enumerate(of_documents):
            sums[number] += sign * nats / len(seeds)
    return ratio_error(sums, tokens), sum(map(bool, tokens))
