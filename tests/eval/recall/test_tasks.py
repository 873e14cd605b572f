"""What tests/contracts/test_tasks.py cannot ask of all tasks: lengths, needles, small splits."""

from __future__ import annotations

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from eval.recall.tasks import generate, make_task
from eval.recall.tasks.base import SPLITS, row_splits


def test_needles_lie_anywhere_and_are_as_many_at_every_length():
    task = make_task("needle", 30, {"keys": "3", "vocab_size": "24"})
    assert task.at_length(300).keys == 3 and task.chance == task.at_length(300).chance == 1 / 12
    examples = generate(task, 900, seed=2, split="test")
    hay, asked = examples.inputs[:, :-3], examples.inputs[:, -3:]
    places = np.sort((hay[:, None] == asked[:, :, None]).argmax(axis=2), axis=1)
    assert (np.diff(places, axis=1) >= 2).all()  # a pair is not written over
    assert set(places.ravel()) == set(range(26))  # the last token before the questions is a value
    assert (hay >= 12).any(axis=0).all()  # values among the hay too
    found = sum(examples.groups[name].astype(int) for name in ("early", "middle", "late"))
    assert (found == 1).all() and all(0.2 < g.mean() < 0.5 for g in examples.groups.values())
    late = (hay[:, None] == asked[:, :, None]).argmax(axis=2) >= 18
    assert np.array_equal(examples.groups["late"], late)


def test_a_small_task_is_divided_between_the_splits():
    """All its rows come, each in one of the splits."""
    task = make_task("mqar", 4, {"keys": "1", "vocab_size": "16", "filler": "zeros"})
    parts = [
        set(map(tuple, generate(task, 2000, seed=0, split=split).inputs.tolist()))
        for split in SPLITS
    ]
    assert sum(map(len, parts)) == 56 and min(map(len, parts[:2])) > 15 and parts[2]
    assert set.union(*parts) == {(k, v, k, 0) for k in range(1, 8) for v in range(8, 16)}


def test_a_split_without_rows_is_refused():
    """One signal, one place, one noise: a single row, which one of the splits has."""
    task = make_task("selective-copy", 2, {"copies": "1", "signals": "1"})
    mine = SPLITS[int(row_splits(np.array([[1, 2]]))[0])]
    assert generate(task, 5, seed=0, split=mine).inputs.tolist() == [[1, 2]] * 5
    for split in set(SPLITS) - {mine}:
        with pytest.raises(UserError, match=f"too few different rows for a {split} split"):
            generate(task, 5, seed=0, split=split)


def test_test_has_half_of_all_rows_and_validation_an_eighth():
    rows = np.random.default_rng(0).integers(0, 50, (80_000, 6))
    shares = np.bincount(row_splits(rows), minlength=3) / len(rows)
    assert shares == pytest.approx([3 / 8, 1 / 2, 1 / 8], abs=0.01)


@pytest.mark.parametrize("filler", ["unused", "zeros"])
@pytest.mark.parametrize("name", ["mqar", "mqnar", "hard-mqnar"])
def test_a_key_of_the_context_stands_again_only_where_it_has_a_label(name, filler):
    task = make_task(name, 61, {"keys": "3", "filler": filler, "vocab_size": "40"})
    examples = generate(task, 300, seed=6, split="train")
    width, n = task.ngram + 1, task.ngram
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        context = task.num_keys * width
        keys = {tuple(inputs[i : i + n]) for i in range(0, context, width)}
        ends = range(context + n - 1, len(inputs))
        found = [t for t in ends if tuple(inputs[t - n + 1 : t + 1]) in keys]
        assert len(keys) == 3
        assert found == [t for t, label in enumerate(labels) if label != IGNORE_INDEX]


def test_copying_feeds_its_answers_or_markers():
    for mode in ("autoregressive", "oneshot"):
        task = make_task("selective-copy", 40, {"copies": "6", "noises": "3", "mode": mode})
        examples = generate(task, 50, seed=0, split="train")
        marker = np.full((50, 6), task.vocabulary - 1)
        if mode == "autoregressive":
            marker[:, 1:] = examples.labels[:, 34:-1]
        assert np.array_equal(examples.inputs[:, 34:], marker)


def test_tasks_have_as_many_keys_as_the_paper_at_every_length():
    assert [make_task("mqar", length).num_keys for length in (64, 512)] == [16, 128]
    assert make_task("mqnar", 256).num_keys == 42
    assert make_task("mqar", 128).at_length(512).num_keys == 128
    assert make_task("mqar", 128, {"keys": "8"}).at_length(512).num_keys == 32
    assert make_task("selective-copy", 64).at_length(256).copies == 16
    unmatched = make_task("mqar", 40, {"vocab_size": "32", "unmatched": "3"})
    assert (unmatched.num_keys, unmatched.queries, unmatched.vocabulary) == (8, 11, 33)
    assert unmatched.at_length(27).unmatched == 2 and unmatched.at_length(27).num_keys == 5
    fixed = unmatched.with_as_many_keys(80)
    assert (fixed.num_keys, fixed.unmatched) == (8, 3)
    assert make_task("hard-mqnar", 64).pool_tokens == 6
