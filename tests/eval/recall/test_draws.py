"""How rows are drawn: what a task leaves open is as likely as it should be, and independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, permutations, product

import numpy as np
import pytest

from cat_lm.core.numbers import IGNORE_INDEX
from eval.recall.tasks import generate, make_task
from eval.recall.tasks.base import distinct_ngrams, draw_unused, weighted_order


def equally_likely(drawn: np.ndarray, choices: Iterable[tuple[int, ...]]) -> None:
    """Each row of `drawn` is one of the choices, and each comes as often, up to chance."""
    counts, choices = Counter(map(tuple, drawn.tolist())), set(choices)
    expected = len(drawn) / len(choices)
    assert set(counts) == choices
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def shares(tokens: np.ndarray, low: int, high: int) -> np.ndarray:
    """How often each of low..high−1 comes, against equal shares; nothing else may."""
    assert tokens.min() >= low and tokens.max() < high
    return np.bincount(tokens.ravel() - low, minlength=high - low) / tokens.size * (high - low)


def test_random_fillers_are_uniform_and_unused_ones_avoid_keys():
    task = make_task("mqar", 32, {"keys": "2", "vocab_size": "20", "filler": "random"})
    examples = generate(task, 4000, seed=0, split="train")
    given = np.zeros(32, dtype=bool)
    given[:4] = True
    fillers = examples.inputs[:, ~given][examples.labels[:, ~given] == IGNORE_INDEX]
    frequencies = np.bincount(fillers, minlength=20) / len(fillers)
    assert np.abs(frequencies * 20 - 1).max() < 0.05
    taken = np.array([[3, 1, 3], [0, 4, 2]])
    drawn = draw_unused(np.random.default_rng(0), (2, 9000), 5, taken)
    first, second = (np.bincount(row, minlength=5) / 9000 for row in drawn)
    assert np.abs(first - np.array([1, 0, 1, 0, 1]) / 3).max() < 0.02
    assert np.abs(second - np.array([0, 1, 0, 1, 0]) / 2).max() < 0.02


def test_gaps_follow_the_published_power_law():
    """The i-th key's slot is the i-th draw with p(g) ∝ g^(a−1); numpy's draws are the reference."""
    task = make_task("mqar", 64, {"keys": "4"})
    examples = generate(task, 20000, seed=0, split="train")
    values = examples.inputs[:, 1:8:2, None]
    gaps = (examples.labels[:, None] == values).argmax(axis=2) - 8
    assert (gaps % 2 == 0).all() and (examples.labels != IGNORE_INDEX).sum() == gaps.size
    rng = np.random.default_rng(0)
    p = 0.01 * np.arange(1, 29) ** (0.01 - 1)
    drawn = np.array([rng.choice(28, 4, replace=False, p=p / p.sum()) for _ in range(20000)])
    for key in range(4):
        measured = np.bincount(gaps[:, key] // 2, minlength=28) / 20000
        expected = np.bincount(drawn[:, key], minlength=28) / 20000
        assert len(measured) == 28 and np.abs(measured - expected).max() < 0.015
    first = np.bincount(gaps[:, 0] // 2)
    assert first[0] > 3 * first[9] > 0


def test_the_order_of_weighted_draws_is_that_of_successive_draws():
    weights = np.array([5.0, 3.0, 2.0])
    order = weighted_order(np.random.default_rng(0), 60000, 2, weights)
    share = np.zeros((3, 3))
    np.add.at(share, (order[:, 0], order[:, 1]), 1 / 60000)
    p = weights / weights.sum()
    expected = np.array([[p[i] * p[j] / (1 - p[i]) * (i != j) for j in range(3)] for i in range(3)])
    assert np.abs(share - expected).max() < 0.01


@pytest.mark.parametrize("count,tokens,ngram", [(2, 5, 2), (2, 9, 1), (3, 4, 1), (2, 2, 2)])
def test_every_ordered_choice_of_ngrams_is_as_likely(count, tokens, ngram):
    """Drawn again until distinct, or from a shuffle of all where there are few."""
    drawn = distinct_ngrams(np.random.default_rng(0), 60000, count, ngram, tokens)
    grams = product(range(tokens), repeat=ngram)
    choices = (sum(choice, ()) for choice in permutations(grams, count))
    equally_likely(drawn.reshape(60000, -1), choices)


@pytest.mark.parametrize("name", ["mqar", "ar"])
def test_keys_and_values_are_distinct_and_in_no_order(name):
    task = make_task(name, 9, {"vocab_size": "12"} | ({"keys": "2"} if name == "mqar" else {}))
    inputs = generate(task, 20000, seed=0, split="train").inputs
    equally_likely(inputs[:, 0:4:2], permutations(range(1, 6), 2))
    equally_likely(inputs[:, 1:4:2], permutations(range(6, 12), 2))


def test_pooled_keys_are_all_bigrams_of_any_tokens():
    """A pool for each row; both tokens of a key may be the same."""
    task = make_task("hard-mqnar", 18, {"vocab_size": "20", "keys": "3", "pool": "3"})
    keys = generate(task, 20000, seed=0, split="train").inputs[:, :9].reshape(-1, 3, 3)[:, :, :2]
    assert np.abs(shares(keys, 1, 10) - 1).max() < 0.05
    assert max(len(np.unique(row)) for row in keys[:500]) == 3
    same = (keys[:, :, 0] == keys[:, :, 1]).mean(axis=0)
    assert np.abs(same - 1 / 3).max() < 0.02


def test_free_tokens_and_the_copys_place_are_any():
    task = make_task("ar", 9, {"layout": "free", "vocab_size": "6"})
    inputs = generate(task, 20000, seed=0, split="train").inputs
    place = (inputs[:, :-1] == inputs[:, -1:]).argmax(axis=1)
    equally_likely(place[:, None], [(place,) for place in range(8)])
    assert np.abs(shares(inputs, 1, 6) - 1).max() < 0.05
    inputs = generate(make_task("nar", 7, {"layout": "free"}), 500, seed=0, split="train").inputs
    copies = (inputs[:, :4] == inputs[:, -2:-1]) & (inputs[:, 1:5] == inputs[:, -1:])
    assert (copies.sum(axis=1) == 1).all() and copies.any(axis=0).all()


def test_copied_tokens_stand_anywhere_among_every_noise():
    options = {"copies": "2", "signals": "4", "noises": "3", "unique": "false"}
    examples = generate(make_task("selective-copy", 10, options), 20000, seed=0, split="train")
    body, signal = examples.inputs[:, :8], examples.labels[:, 8:]
    equally_likely(np.nonzero(body >= 3)[1].reshape(-1, 2), combinations(range(8), 2))
    equally_likely(signal, product(range(3, 7), repeat=2))
    assert np.abs(shares(body[body < 3], 0, 3) - 1).max() < 0.02
