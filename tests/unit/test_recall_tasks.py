"""The synthetic tasks: every label right, nothing asked by accident, splits that cannot meet."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from eval.recall.tasks import TASKS, generate, make_task
from eval.recall.tasks.base import SPLITS, row_splits

CASES = [
    ("ar", 33, {}),
    ("ar", 32, {"layout": "free", "vocab_size": "12"}),
    ("nar", 33, {"ngram": "3"}),
    ("nar", 40, {"layout": "free", "vocab_size": "9"}),
    ("mqar", 64, {}),
    ("mqar", 64, {"keys": "4", "filler": "random"}),
    ("mqar", 70, {"keys": "5", "filler": "zeros", "vocab_size": "64"}),
    ("mqnar", 64, {}),
    ("mqnar", 96, {"ngram": "4", "keys": "3"}),
    ("hard-mqnar", 64, {}),
    ("hard-mqnar", 64, {"pool": "dense", "ngram": "3"}),
    ("needle", 48, {"vocab_size": "40"}),
    ("selective-copy", 64, {}),
    ("selective-copy", 48, {"unique": "false", "signals": "5", "noises": "3", "copies": "9"}),
    ("selective-copy", 48, {"mode": "oneshot", "copies": "8"}),
]


def name_of(case: tuple) -> str:
    return "-".join(str(part) for part in (case[0], case[1], *case[2].values()))


@pytest.fixture(params=CASES, ids=name_of, scope="module")
def task(request):
    return make_task(*request.param)


def test_rows_are_a_pure_function_of_the_seed(task):
    first = generate(task, 50, seed=1, split="train")
    again = generate(task, 50, seed=1, split="train")
    other = generate(task, 50, seed=2, split="train")
    assert np.array_equal(first.inputs, again.inputs) and np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.inputs, other.inputs)
    assert first.inputs.shape == first.labels.shape == (50, task.seq_len)
    assert first.inputs.min() >= 0 and first.inputs.max() < task.vocabulary


def test_no_row_is_in_two_splits(task):
    def rows(seed: int, split: str) -> set[bytes]:
        return {row.tobytes() for row in generate(task, 1000, seed=seed, split=split).inputs}

    train, test, validation = (rows(seed, split) for seed, split in enumerate(SPLITS, 3))
    assert not train & test and not train & validation and not test & validation
    assert not train & rows(3, "test") and not train & rows(3, "validation")
    assert not test & rows(4, "validation")


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "selective-copy"], ids=name_of)
def test_every_label_is_what_follows_the_only_earlier_copy(case):
    """Read off the rows alone: no use of how they were made."""
    task = make_task(*case)
    examples = generate(task, 60, seed=5, split="train")
    n, asked = getattr(task, "ngram", 1), []
    accidents = case[2].get("filler") == "random"  # a filler may equal a key; never before its pair
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        queries = [t for t, label in enumerate(labels) if label != IGNORE_INDEX]
        asked.append(len(queries))
        for t in queries:
            gram = inputs[t - n + 1 : t + 1]
            copies = [i for i in range(t - n + 1) if inputs[i : i + n] == gram]
            assert len(copies) == 1 or accidents
            assert inputs[copies[0] + n] == labels[t]
    several = task.keys if case[0] == "needle" else getattr(task, "num_keys", 1)
    assert set(asked) == {1 if case[0] in ("ar", "nar") else several}


@pytest.mark.parametrize("filler", ["unused", "zeros"])
@pytest.mark.parametrize("name", ["mqar", "mqnar", "hard-mqnar"])
def test_nothing_is_asked_by_accident(name, filler):
    """A key of the context stands again only where it has a label."""
    task = make_task(name, 61, {"keys": "3", "filler": filler, "vocab_size": "40"})
    examples = generate(task, 300, seed=6, split="train")
    width, n = task.ngram + 1, task.ngram
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        context = task.num_keys * width
        keys = {tuple(inputs[i : i + n]) for i in range(0, context, width)}
        assert len(keys) == task.num_keys
        found = [
            t
            for t in range(context + n - 1, len(inputs))
            if tuple(inputs[t - n + 1 : t + 1]) in keys
        ]
        assert found == [t for t, label in enumerate(labels) if label != IGNORE_INDEX]


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
    tight = make_task("needle", 9, {"keys": "3", "vocab_size": "64"})  # nothing but needles
    rows = generate(tight, 20, seed=0, split="train")
    assert ((rows.inputs[:, 0:6:2] < 32) & (rows.inputs[:, 1:6:2] >= 32)).all()
    for options, named in (
        ({"keys": "0"}, "keys=0: must be at least 1"),
        ({"keys": "11"}, "keys=11: with their values"),
        ({"vocab_size": "8"}, "vocab_size=8: too small for 4 keys"),
    ):
        with pytest.raises(UserError, match=named):
            make_task("needle", 30, options)


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


def test_pairs_are_as_many_as_fit_behind_zeros():
    task = make_task("nar", 12, {"vocab_size": "16"})
    assert task.num_keys == 3
    inputs = generate(task, 100, seed=0, split="train").inputs
    tokens = inputs[:, 1:10].reshape(100, 3, 3)
    assert (inputs[:, 0] == 0).all() and (tokens[:, :, 2] >= 8).all()
    assert (tokens[:, :, :2] > 0).all() and (tokens[:, :, :2] < 8).all()


@pytest.mark.parametrize("unique", ["true", "false"])
@pytest.mark.parametrize("mode", ["autoregressive", "oneshot"])
def test_selective_copying_has_the_signals_in_order(mode, unique):
    options = {"copies": "6", "signals": "9", "noises": "3", "mode": mode, "unique": unique}
    task = make_task("selective-copy", 40, options)
    assert task.vocabulary - 1 == 12
    examples = generate(task, 300, seed=0, split="train")
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        signal = [token for token in inputs[:34] if token >= 3]
        assert labels == [IGNORE_INDEX] * 34 + signal
        assert max(signal) < 12 and (unique == "false" or len(set(signal)) == 6)
        fed = signal[:-1] if mode == "autoregressive" else [task.vocabulary - 1] * 5
        assert inputs[34:] == [task.vocabulary - 1, *fed]


def test_at_the_papers_density_every_slot_is_asked():
    for name, seq_len, keys in [("mqar", 64, 16), ("mqar", 512, 128), ("mqnar", 256, 42)]:
        task = make_task(name, seq_len)
        assert task.num_keys == keys
        assert (generate(task, 20, seed=0, split="test").labels != IGNORE_INDEX).sum() == 20 * keys


CHANCE = [
    ("ar", 13, {"vocab_size": "16"}),
    ("ar", 9, {"layout": "free", "vocab_size": "12"}),
    ("ar", 8, {"layout": "free", "vocab_size": "4"}),
    ("nar", 14, {"layout": "free", "vocab_size": "7"}),
    ("mqar", 24, {"keys": "3", "vocab_size": "16"}),
    ("mqnar", 24, {"vocab_size": "12"}),
    ("hard-mqnar", 24, {"vocab_size": "12"}),
    ("mqnar", 24, {"vocab_size": "12", "unmatched": "2"}),
    ("mqar", 32, {"vocab_size": "16", "unmatched": "1", "keys": "3"}),
    ("selective-copy", 16, {"copies": "4", "signals": "5"}),
    ("selective-copy", 16, {"copies": "4", "signals": "5", "unique": "false"}),
    ("selective-copy", 16, {"copies": "4", "signals": "5", "mode": "oneshot"}),
]


@pytest.mark.parametrize("case", CHANCE, ids=name_of)
def test_one_token_alone_tells_no_more_than_chance(case):
    """The best table token -> answer, made of other rows; and it does come up to chance."""
    task = make_task(*case)
    counts = np.zeros((task.vocabulary, task.vocabulary))
    train, test = (generate(task, 12000, seed=i, split=s) for i, s in enumerate(("train", "test")))
    scored = train.labels != IGNORE_INDEX
    np.add.at(counts, (train.inputs[scored], train.labels[scored]), 1)
    scored = test.labels != IGNORE_INDEX
    right = counts.argmax(axis=1)[test.inputs[scored]] == test.labels[scored]
    spread = (task.chance * (1 - task.chance) / len(right)) ** 0.5
    assert abs(right.mean() - task.chance) < 5 * spread + 0.06 * task.chance


HASHES = {
    ("ar", 33): "f035387453918be2",
    ("mqar", 64): "7b21351e83d00090",
    ("hard-mqnar", 64): "b691af14b9b1c934",
    ("selective-copy", 64): "462687e031f0d97b",
}


@pytest.mark.parametrize("case", HASHES, ids=str)
def test_rows_stay_what_they_were(case):
    examples = generate(make_task(*case), 100, seed=0, split="test")
    found = hashlib.sha256(examples.inputs.tobytes() + examples.labels.tobytes()).hexdigest()
    assert found[:16] == HASHES[case]


@pytest.mark.parametrize(
    "name,seq_len,options,words",
    [
        ("mqar", 64, {"keys": "17"}, "keys=17: seq_len=64 fits 1 to 16"),
        ("mqnar", 64, {"keys": "11"}, "fits 1 to 10"),
        ("mqnar", 64, {"ngram": "32"}, "too short"),
        ("mqar", 64, {"keys": "x"}, "must be a whole number such as"),
        ("mqar", 64, {"ngram": "2"}, "unknown option 'ngram'"),
        ("mqar", 64, {"key": "2"}, "did you mean keys"),
        ("mqar", 64, {"vocab_size": "20"}, "vocab_size=20"),
        ("hard-mqnar", 64, {"pool": "3"}, "9 2-grams, 10 keys needed"),
        ("hard-mqnar", 64, {"pool": "many"}, "pool='many'"),
        ("mqar", 64, {"unmatched": "-1"}, "unmatched=-1: must be at least 0"),
        ("mqar", 64, {"unmatched": "31"}, "31 queries without a match need 66 tokens"),
        ("mqar", 64, {"keys": "13", "unmatched": "8"}, "keys=13: seq_len=64 fits 1 to 12"),
        ("hard-mqnar", 64, {"pool": "3", "unmatched": "2"}, "9 2-grams, 11 keys needed"),
        ("mqar", 64, {"filler": "none"}, "choose one of unused, random, zeros"),
        ("ar", 64, {"layout": "free", "vocab_size": "2"}, "too few"),
        ("selective-copy", 64, {"signals": "8"}, "need as many signals"),
        ("selective-copy", 64, {"unique": "maybe"}, "must be true or false"),
        ("selective-copy", 20, {}, "32 tokens are needed"),
        ("copy", 20, {}, "must be one of ar, nar"),
    ],
)
def test_options_that_do_not_fit_are_one_clear_line(name, seq_len, options, words):
    with pytest.raises(UserError) as error:
        make_task(name, seq_len, options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_longer_tasks_ask_in_proportion():
    assert make_task("mqar", 128).at_length(512).num_keys == 128
    assert make_task("mqar", 128, {"keys": "8"}).at_length(512).num_keys == 32
    assert make_task("selective-copy", 64).at_length(256).copies == 16
    assert {*TASKS.names()} == {
        "ar",
        "nar",
        "mqar",
        "mqnar",
        "hard-mqnar",
        "needle",
        "selective-copy",
    }
