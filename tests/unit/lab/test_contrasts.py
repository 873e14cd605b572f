"""Differences between models: intervals over seeds and documents, corrected for their number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t as student

from eval.lab import contrasts as comparison
from eval.lab.contrasts import compare, ratio_error, summarise, t_quantile


def test_difference_by_hand():
    a, b = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.3, 1: 1.6, 2: 1.3}
    found = compare(a, b)
    # d = -0.3, -0.4, -0.2: mean -0.3, sd 0.1; variances 0.01 and 0.03
    assert found.mean == pytest.approx(-0.3)
    assert found.spread == pytest.approx(math.sqrt(0.02))
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((-0.3 - half, -0.3 + half), abs=1e-5)
    assert found.verdict == "lower"
    assert compare(b, a).verdict == "higher"


def test_a_word_is_lost_where_many_comparisons_are_made():
    a, b = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.3, 1: 1.6, 2: 1.3}
    found = compare(a, b, comparisons=10)
    half = student.ppf(1 - 0.025 / 10, 2) * 0.1 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((-0.3 - half, -0.3 + half))
    assert (found.verdict, found.comparisons) == ("unclear", 10)


def test_few_documents_widen_an_interval():
    a, b = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.3, 1: 1.6, 2: 1.3}
    found = compare(a, b, document_error=0.1, documents=9)
    half = math.hypot(student.ppf(0.975, 2) * 0.1 / math.sqrt(3), student.ppf(0.975, 8) * 0.1)
    assert (found.low, found.high) == pytest.approx((-0.3 - half, -0.3 + half))
    assert found.verdict == "unclear"
    assert (found.seed_error, found.document_error) == pytest.approx((0.1 / math.sqrt(3), 0.1))
    assert found.documents == 9
    with pytest.raises(ValueError, match="number of documents"):
        compare(a, b, document_error=0.1)


def test_the_error_over_documents_is_not_widened_by_few_seeds():
    """With 56 comparisons Student's t is 33 for three seeds, 3.5 for a hundred documents."""
    a, b = {0: 1.0, 1: 1.001, 2: 0.999}, {0: 1.2, 1: 1.2, 2: 1.2}
    found = compare(a, b, 56, document_error=0.01, documents=100)
    seeds, documents = (student.ppf(1 - 0.025 / 56, df) for df in (2, 99))
    assert seeds > 33 and documents < 3.5
    half = math.hypot(seeds * 0.001 / math.sqrt(3), documents * 0.01)
    assert (found.low, found.high) == pytest.approx((-0.2 - half, -0.2 + half))
    assert found.verdict == "lower" and -0.2 + seeds * 0.01 > 0, "it would be unclear"


def coverage(seeds: int, documents: int, ratio: float) -> float:
    """How often an interval holds the true difference, 0, over studies that are made up.

    Args:
        ratio: of the error over seeds to that over documents.
    """
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(4000):
        of_seed = generator.normal(0, ratio * math.sqrt(seeds), (seeds, 1))
        of_document = generator.normal(0, math.sqrt(documents), documents)
        losses = of_seed + of_document + generator.normal(0, 0.5, (seeds, documents))
        error = ratio_error(list(losses.mean(0)), [1] * documents)
        found = compare(
            dict(enumerate(losses.mean(1))), dict.fromkeys(range(seeds), 0.0), 1, error, documents
        )
        held += found.low <= 0 <= found.high
    return held / 4000


COVERED = [(3, 8, 1.0), (3, 60, 2.0), (6, 8, 1.0), (6, 20, 1.5)]


@pytest.mark.parametrize(("seeds", "documents", "ratio"), COVERED)
def test_intervals_hold_the_truth_as_often_as_said(seeds, documents, ratio, monkeypatch):
    assert coverage(seeds, documents, ratio) >= 0.95
    # The same numbers tell a quantile that is too small: of the normal distribution.
    monkeypatch.setattr(comparison, "t_quantile", lambda *_: 1.96)
    assert coverage(seeds, documents, ratio) < 0.95


@pytest.mark.parametrize(("seeds", "documents", "ratio"), COVERED[1::2])
def test_the_documents_quantile_is_too_small_for_seeds(seeds, documents, ratio, monkeypatch):
    plain = t_quantile
    monkeypatch.setattr(comparison, "t_quantile", lambda level, _: plain(level, documents - 1))
    assert coverage(seeds, documents, ratio) < 0.95


@pytest.mark.parametrize(
    ("differences", "noise", "verdict"),
    [
        ((-0.10, -0.11, -0.09), 0.0, "lower"),
        ((0.10, 0.11, 0.09), 0.0, "higher"),
        ((0.10, 0.11, 0.09), 0.2, "higher"),  # paired: what both seeds share is no noise
        ((0.10, 0.30, 0.01), 0.0, "unclear"),
        ((0.0, 0.0, 0.0), 0.0, "unclear"),
    ],
)
def test_verdicts(differences, noise, verdict):
    base = {seed: 3.0 + noise * shift for seed, shift in enumerate((-1, 1, 0))}
    other = {seed: base[seed] + d for seed, d in enumerate(differences)}
    assert compare(other, base).verdict == verdict


def test_seeds_are_paired_and_one_says_nothing():
    found = compare({0: 1.0, 5: 9.0}, {0: 2.0, 7: 1.0})
    assert (found.mean, found.n, found.verdict, found.spread) == (-1.0, 1, "one seed", None)
    assert compare({0: 1.0}, {1: 1.0}) is None
    assert summarise([2.0]).sd is None
    assert summarise([1.0, 2.0, 3.0]).sd == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_says_nothing(value):
    """A run that diverged, or an error over one document (nan), must not become a word."""
    diverged = compare({0: value, 1: 1.0, 2: 1.1}, {0: 2.0, 1: value, 2: 3.1})
    assert (diverged.verdict, diverged.low, diverged.n, diverged.lost) == ("unclear", None, 1, 2)
    assert diverged.mean == pytest.approx(-2.0), "of the seed that is left"
    found = compare({0: 1.0, 1: 1.1}, {0: 2.0, 1: 2.1}, document_error=value, documents=2)
    assert (found.verdict, found.low) == ("unclear", None)
    one = compare({0: 1.0, 1: 1.1}, {0: 2.0, 1: 2.1}, document_error=0.0, documents=1)
    assert (one.verdict, one.low) == ("unclear", None)


def test_seeds_that_all_differ_by_the_same_carry_no_word_and_no_interval():
    """Accuracies of a few thousand rows, or steps counted in hundreds, can; with documents not."""
    a, b = dict.fromkeys(range(3), 1.0), dict.fromkeys(range(3), 0.875)
    found = compare(a, b, 8)
    assert (found.mean, found.low, found.high, found.verdict) == (0.125, None, None, "unclear")
    assert compare(a, b, 8, document_error=0.01, documents=100).verdict == "higher"
    equal = compare(a, a, 8)  # all of 1.000 is no proof of equality either
    assert (equal.mean, equal.low, equal.high, equal.verdict) == (0, None, None, "unclear")
    # The same number of errors, 7 of 12,000: fractions round, and the differences with them.
    b, a = (dict(enumerate((n + k) / 12_000 for n in (11_929, 11_910, 11_989))) for k in (0, 7))
    assert len({a[seed] - b[seed] for seed in b}) > 1
    assert (compare(a, b).low, compare(a, b).verdict) == (None, "unclear")
    a[0] += 1 / 12_000
    assert compare(a, b).low is not None


def test_seeds_that_are_left_are_a_choice_and_carry_no_word():
    a, b = {0: 1.0, 1: 1.01, 2: 0.99}, {0: 2.0, 1: 2.02, 2: 1.99}
    assert compare(a, b).verdict == "lower"
    lost = compare({**a, 3: math.nan}, b)
    assert (lost.verdict, lost.low, lost.n, lost.lost) == ("unclear", None, 3, 1)
    # What is not finished yet is another thing.
    assert compare({**a, 3: 1.0}, b).verdict == "lower"
    # One seed that is left of two is not one seed.
    assert compare({0: 1.0, 1: math.nan}, {0: 2.0, 1: 2.1}).verdict == "unclear"
    none = compare({0: math.nan}, {0: 1.0})
    assert (none.n, none.verdict) == (0, "unclear") and math.isnan(none.mean)


def test_all_words_together_are_seldom_wrong():
    """Twelve models that are all the same, 400 studies: at most 5% of these say any word."""
    generator = np.random.default_rng(0)
    wrong = plain = 0
    for values in generator.normal(size=(400, 12, 6)):
        seeds = [dict(enumerate(model)) for model in values]
        wrong += any(compare(m, seeds[0], 11).verdict != "unclear" for m in seeds[1:])
        plain += any(compare(m, seeds[0]).verdict != "unclear" for m in seeds[1:])
    assert wrong <= 0.05 * 400 < plain


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 9, 30])
@pytest.mark.parametrize("probability", [0.6, 0.975, 0.9995, 0.99999])
def test_quantiles_are_student_s(df, probability):
    assert t_quantile(probability, df) == pytest.approx(student.ppf(probability, df), rel=1e-9)


def test_ratio_error_of_equal_groups_is_that_of_their_means():
    sums = [3.0, 5.0, 4.0, 8.0]
    means = np.array(sums) / 2
    assert ratio_error(sums, [2] * 4) == pytest.approx(means.std(ddof=1) / 2)
    assert math.isnan(ratio_error([3.0], [2]))
    assert math.isnan(ratio_error([math.inf, -math.inf, 1.0], [2] * 3))
