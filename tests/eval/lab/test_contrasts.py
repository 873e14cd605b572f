"""Differences between models: intervals over seeds and documents, corrected for their number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from eval.lab import contrasts as comparison
from eval.lab.contrasts import compare, compute, difference_of, ratio_error, t_quantile

A, B = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.3, 1: 1.6, 2: 1.3}  # d: mean -0.3, sd 0.1


def test_difference_by_hand():
    found = compare(A, B)
    half = student.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((-0.3, -0.3 - half, -0.3 + half))
    assert found.spread == pytest.approx(math.sqrt(0.02))  # of variances 0.01 and 0.03
    assert (found.verdict, compare(B, A).verdict) == ("lower", "higher")


def test_many_comparisons_widen_an_interval():
    found = compare(A, B, comparisons=10)
    half = student.ppf(1 - 0.025 / 10, 2) * 0.1 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((-0.3 - half, -0.3 + half))
    assert (found.verdict, found.comparisons) == ("unclear", 10)


def test_documents_widen_an_interval_by_their_own_quantile():
    """With 56 comparisons Student's t is 33 for three seeds, 3.5 for a hundred documents."""
    found = compare(A, B, 56, document_error=0.1, documents=100)
    seeds, documents = (student.ppf(1 - 0.025 / 56, df) for df in (2, 99))
    half = math.hypot(seeds * 0.1 / math.sqrt(3), documents * 0.1)
    assert (found.low, found.high) == pytest.approx((-0.3 - half, -0.3 + half))
    assert (found.seed_error, found.document_error) == pytest.approx((0.1 / math.sqrt(3), 0.1))
    with pytest.raises(ValueError, match="number of documents"):
        compare(A, B, document_error=0.1)


def coverage(seeds: int, documents: int, ratio: float) -> float:
    """How often an interval holds the true difference, 0, over studies that are made up.

    Args:
        ratio: of the error over seeds to that over documents.
    """
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        of_seed = generator.normal(0, ratio * math.sqrt(seeds), (seeds, 1))
        of_document = generator.normal(0, math.sqrt(documents), documents)
        losses = of_seed + of_document + generator.normal(0, 0.5, (seeds, documents))
        error = ratio_error(list(losses.mean(0)), [1] * documents)
        other = dict.fromkeys(range(seeds), 0.0)
        found = compare(dict(enumerate(losses.mean(1))), other, 1, error, documents)
        held += found.low <= 0 <= found.high
    return held / 2000


@pytest.mark.parametrize(("seeds", "documents", "ratio"), [(3, 8, 1.0), (3, 60, 2.0), (6, 20, 1.5)])
def test_intervals_hold_the_truth_as_often_as_said(seeds, documents, ratio, monkeypatch):
    assert coverage(seeds, documents, ratio) >= 0.95
    # The same numbers show a quantile that is too small: of the normal distribution.
    monkeypatch.setattr(comparison, "t_quantile", lambda *_: 1.96)
    assert coverage(seeds, documents, ratio) < 0.95


def test_documents_quantile_is_too_small_for_seeds(monkeypatch):
    monkeypatch.setattr(comparison, "t_quantile", lambda level, _: t_quantile(level, 59))
    assert coverage(3, 60, 2.0) < 0.95


numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=6), st.integers(1, 50))
def test_difference_is_paired_signed_and_unclear_where_it_holds_zero(values, comparisons):
    a, b = (dict(enumerate(side)) for side in zip(*values, strict=True))
    found, back = compare(a, b, comparisons), compare(b, a, comparisons)
    assert found.mean == pytest.approx(-back.mean)
    shifted = compare(*({k: v + k for k, v in side.items()} for side in (a, b)), comparisons)
    assert shifted.mean == pytest.approx(found.mean, abs=1e-9)  # what seeds share is no noise
    if found.low is not None:
        assert (found.low, found.high) == pytest.approx((-back.high, -back.low))
        assert (found.verdict == "unclear") == (found.low <= 0 <= found.high)
        assert compare(a, b, comparisons + 1).low <= found.low


def test_seeds_are_paired_and_one_says_nothing():
    found = compare({0: 1.0, 5: 9.0}, {0: 2.0, 7: 1.0})
    assert (found.mean, found.n, found.verdict, found.spread) == (-1.0, 1, "one seed", None)
    assert compare({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_leaves_no_interval(value):
    """Seeds that are left, or an error over one document (nan), must not become a word."""
    diverged = compare({0: value, 1: 1.0, 2: 1.1}, {0: 2.0, 1: value, 2: 3.1})
    assert (diverged.verdict, diverged.low, diverged.n, diverged.lost) == ("unclear", None, 1, 2)
    assert diverged.mean == pytest.approx(-2.0), "of the seed that is left"
    lost = compare({**A, 3: value}, B)
    assert (lost.verdict, lost.low, lost.n, lost.lost) == ("unclear", None, 3, 1)
    assert compare({**A, 3: 1.0}, B).verdict == "lower", "a seed that is not finished is no loss"
    for error, documents in ((value, 2), (0.0, 1)):
        found = compare(A, B, document_error=error, documents=documents)
        assert (found.verdict, found.low) == ("unclear", None)


def test_seeds_that_all_differ_by_the_same_leave_no_interval():
    """Accuracies of a few thousand rows can; with an error over documents they may."""
    a, b = dict.fromkeys(range(3), 1.0), dict.fromkeys(range(3), 0.875)
    found = compare(a, b, 8)
    assert (found.mean, found.low, found.high, found.verdict) == (0.125, None, None, "unclear")
    assert compare(a, b, 8, document_error=0.01, documents=100).verdict == "higher"
    assert compare(a, a, 8).verdict == "unclear"  # all of 1.000 is no proof of equality either
    # The same number of errors, 7 of 12,000: fractions round, and the differences with them.
    b, a = (dict(enumerate((n + k) / 12_000 for n in (11_929, 11_910, 11_989))) for k in (0, 7))
    assert len({a[seed] - b[seed] for seed in b}) > 1
    assert compare(a, b).low is None
    a[0] += 1 / 12_000
    assert compare(a, b).low is not None


def test_all_words_together_are_seldom_wrong():
    """Twelve models that are all the same, 400 studies: at most 5% of these have any word."""
    generator = np.random.default_rng(0)
    wrong = plain = 0
    for values in generator.normal(size=(400, 12, 6)):
        seeds = [dict(enumerate(model)) for model in values]
        wrong += any(compare(m, seeds[0], 11).verdict != "unclear" for m in seeds[1:])
        plain += any(compare(m, seeds[0]).verdict != "unclear" for m in seeds[1:])
    assert wrong <= 0.05 * 400 < plain


def test_ratio_error_of_equal_groups_is_that_of_their_means():
    sums = [3.0, 5.0, 4.0, 8.0]
    means = np.array(sums) / 2
    assert ratio_error(sums, [2] * 4) == pytest.approx(means.std(ddof=1) / 2)
    assert math.isnan(ratio_error([3.0], [2]))
    assert math.isnan(ratio_error([math.inf, -math.inf, 1.0], [2] * 3))


def test_documents_of_both_sides_make_the_error_of_a_contrast():
    tokens, nats = [4, 6, 5], {"a": [8.0, 9.0, 10.0], "b": [6.0, 10.0, 9.0]}
    lines = [
        {"row": "text", "column": "", "line": name, "x": 16, "runs": {"0": 1.8, "1": 1.7}}
        | {"documents": {"tokens": tokens, "nats": {"0": x, "1": x}}}
        for name, x in nats.items()
    ]
    (found,) = compute([difference_of(*lines)])
    differences = [a - b for a, b in zip(nats["a"], nats["b"], strict=True)]
    assert found["document_error"] == pytest.approx(ratio_error(differences, tokens))
    assert found["documents"] == 3
    del lines[1]["documents"]
    assert compute([difference_of(*lines)])[0]["document_error"] is None
