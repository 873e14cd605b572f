"""What every task of recall and of the long range does: shapes, draws, splits, right answers.

Answers are found by readers written here, which see the rows alone and of them no token after the
one that is scored.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from cat_lm.core.fields import parse_specification
from cat_lm.core.numbers import IGNORE_INDEX
from eval.long_range import tasks as long_range
from eval.long_range.tasks import SPLITS, Place
from eval.long_range.tasks.listops import ListOps
from eval.long_range.tasks.store import StoredTask
from eval.recall import tasks as recall
from eval.recall.tasks import generate
from tests.eval.long_range import files

# A task and its length -> the first digits of the hash of its rows, which no change may move.
RECALL = {
    ("ar", 33): "f035387453918be2",
    ("ar:layout=free,vocab_size=12", 32): "",
    ("nar:ngram=3", 33): "",
    ("nar:layout=free,vocab_size=9", 40): "",
    ("mqar", 64): "7b21351e83d00090",
    ("mqar:keys=4,filler=random", 64): "",
    ("mqar:keys=5,filler=zeros,vocab_size=64", 70): "",
    ("mqar:vocab_size=32,unmatched=3", 40): "",
    ("mqnar", 64): "",
    ("mqnar:ngram=4,keys=3", 96): "",
    ("hard-mqnar", 64): "b691af14b9b1c934",
    ("hard-mqnar:pool=dense,ngram=3", 64): "",
    ("needle:vocab_size=40", 48): "",
    ("selective-copy", 64): "462687e031f0d97b",
    ("selective-copy:unique=false,signals=5,noises=3,copies=9", 48): "",
    ("selective-copy:mode=oneshot,copies=8", 48): "",
}
CHANCE = (
    ("ar:vocab_size=16", 13),
    ("ar:layout=free,vocab_size=12", 9),
    ("ar:layout=free,vocab_size=4", 8),
    ("nar:layout=free,vocab_size=7", 14),
    ("mqar:keys=3,vocab_size=16", 24),
    ("mqnar:vocab_size=12", 24),
    ("hard-mqnar:vocab_size=12", 24),
    ("mqnar:vocab_size=12,unmatched=2", 24),
    ("mqar:vocab_size=16,unmatched=1,keys=3", 32),
    ("needle:keys=2,vocab_size=16", 24),
    ("selective-copy:copies=4,signals=5", 16),
    ("selective-copy:copies=4,signals=5,unique=false", 16),
    ("selective-copy:copies=4,signals=5,mode=oneshot", 16),
)
GENERATED = (
    "listops:min_length=3,max_length=40,train=60,validation=20,test=20",
    "select:noise=20,marked=5,train=60,validation=20,test=20",
    "cumsum:seq_len=24,train=60,validation=20,test=20",
    "cummax:seq_len=24,train=60,validation=20,test=20",
)
READ = (
    *("listops:source=official", "imdb", "imdb:protocol=lra,level=bytes", "aan"),
    *("aan:level=bytes,max_length=9", "cifar10", "cifar10:pixels=ids", "pathfinder"),
    *("pathfinder:pixels=ids", "smnist", "smnist:size=14", "pmnist", "pmnist:order=7"),
)
APPLY = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}


def made(case: tuple[str, int]) -> recall.Task:
    name, options = parse_specification(case[0])
    return recall.make_task(name, case[1], options)


@pytest.fixture(params=RECALL, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def task(request):
    return made(request.param)


def scored(task, count: int = 60, seed: int = 5, split: str = "train"):
    """Yield of each scored position the row up to it, and the answer."""
    examples = generate(task, count, seed=seed, split=split)
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        for t, label in enumerate(labels):
            if label != IGNORE_INDEX:
                yield inputs[: t + 1], label


def answer(task, read: list[int]) -> int:
    """Find the answer at the end of what was read."""
    if not task.recalls:
        body = task.seq_len - task.copies
        signals = [x for x in read[:body] if task.noises <= x < task.noises + task.signals]
        return signals[len(read) - body - 1]
    n = getattr(task, "ngram", 1)
    places = [i for i in range(len(read) - n) if read[i : i + n] == read[-n:]]
    if getattr(task, "filler", "") != "random":  # a filler may equal a key, never before its pair
        assert len(places) <= 1
    return read[places[0] + n] if places else task.vocab_size


class TestRecall:
    def test_rows_have_their_shape_and_depend_on_the_seed_alone(self, task):
        first, again, other = (generate(task, 50, seed=s, split="train") for s in (1, 1, 2))
        assert first.inputs.shape == first.labels.shape == (50, task.seq_len)
        assert first.inputs.dtype == first.labels.dtype == np.int64
        assert first.inputs.min() >= 0 and first.inputs.max() < task.vocabulary
        assert np.array_equal(first.inputs, again.inputs)
        assert np.array_equal(first.labels, again.labels)
        assert not np.array_equal(first.inputs, other.inputs)
        assert type(task)(**task.describe()) == task

    @pytest.mark.parametrize("case", [case for case, digits in RECALL.items() if digits], ids=str)
    def test_rows_stay_what_they_were(self, case):
        rows = generate(made(case), 100, seed=0, split="test")
        found = hashlib.sha256(rows.inputs.tobytes() + rows.labels.tobytes()).hexdigest()
        assert found[:16] == RECALL[case]

    def test_no_row_is_in_two_splits(self, task):
        for seeds in ((3, 4, 5), (3, 3, 3)):
            train, test, validation = (
                {row.tobytes() for row in generate(task, 1000, seed=seed, split=split).inputs}
                for seed, split in zip(seeds, recall.base.SPLITS, strict=True)
            )
            assert not train & test and not train & validation and not test & validation

    def test_answers_follow_from_what_was_read(self, task):
        found = list(scored(task))
        assert all(answer(task, read) == label for read, label in found)
        each = {"ar": 1, "nar": 1}.get(type(task).__name__, 0)
        several = getattr(task, "queries", None) or getattr(task, "copies", None) or each
        assert len(found) == 60 * (several or getattr(task, "keys", 1))

    @pytest.mark.parametrize("case", CHANCE, ids=str)
    def test_one_token_alone_tells_no_more_than_chance(self, case):
        """The best table token -> answer, made of other rows; and it does come up to chance."""
        task = made(case)
        counts = np.zeros((task.vocabulary, task.vocabulary))
        rows = [generate(task, 12000, seed=i, split=s) for i, s in enumerate(("train", "test"))]
        (asked, known), (read, wanted) = (
            (x.inputs[x.labels != IGNORE_INDEX], x.labels[x.labels != IGNORE_INDEX]) for x in rows
        )
        np.add.at(counts, (asked, known), 1)
        right = counts.argmax(axis=1)[read] == wanted
        spread = (task.chance * (1 - task.chance) / len(right)) ** 0.5
        assert abs(right.mean() - task.chance) < 5 * spread + 0.06 * task.chance


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Official files of all data sets, small."""
    root = tmp_path_factory.mktemp("official")
    files.write_mnist(root / "mnist")
    files.write_cifar(root / "cifar-10-batches-bin")
    files.write_folder(root)
    files.write_files(root / "listops-1000", [("( [MAX 4 ( [SM 9 3 ] ) ] )", 4), ("[MIN 2 1 ]", 1)])
    letters, every = "abcdefghij", itertools.product(("train", "test"), ("pos", "neg"), range(20))
    texts = {x: f"{x[:2]} {letters[x[2] // 10]}{letters[x[2] % 10]} {letters * 3}" for x in every}
    files.write_reviews(root, texts)
    files.write_pairs(root / "tsv_data")
    return root


@pytest.fixture(params=(*GENERATED, *READ), scope="module")
def loaded(request, folder, tmp_path_factory):
    """A task, its place and its splits."""
    task = long_range.make_task(request.param)
    place = Place(folder if task.reads_files else None, tmp_path_factory.mktemp("cache"))
    return task, place, {split: task.load(split, place) for split in SPLITS}


def contents(examples) -> list[tuple[bytes, bytes]]:
    """Return the inputs of each row without padding, and its labels."""
    found = []
    for inputs, lengths, labels in zip(*examples.batch(np.arange(len(examples))), strict=True):
        pairs = zip(inputs.reshape(lengths.size, -1), lengths.ravel(), strict=True)
        row = inputs[:lengths] if lengths.ndim == 0 else np.concatenate([x[:n] for x, n in pairs])
        found.append((row.tobytes(), labels.tobytes()))
    return found


def derived(task, batch) -> np.ndarray:
    """Find the answers of rows."""
    if task.name == "listops":
        return np.array([[value(task.shown(row, {}))] for row in batch.inputs])[:, 0]
    numbers = batch.inputs[:, :, 0].astype(float)
    if task.name == "select":
        return np.array([row[row[:, 1] == 1, 0] for row in batch.inputs])
    time = range(1, task.length + 1)
    if task.name == "cummax":
        return np.stack([numbers[:, :t].max(axis=1) for t in time], axis=1)
    return np.stack([numbers[:, :t].sum(axis=1) / math.sqrt(t) for t in time], axis=1)


def value(text: str) -> int:
    """Evaluate operations by replacing innermost ones in the text until a digit is left."""

    def apply(found: re.Match) -> str:
        return str(APPLY[found[1]]([int(digit) for digit in found[2].split()]))

    text = text.removesuffix(" <eos>")
    while not text.isdigit():
        text, changed = re.subn(r"\[([A-Z]+)((?: [0-9])+) X", apply, text)
        assert changed, text
    return int(text)


class TestLongRange:
    def test_rows_have_their_shape(self, loaded):
        task, _, splits = loaded
        assert (task.vocabulary > 0) != (task.channels > 0)
        assert (task.classes > 0) != (task.scored > 0)
        assert task.metric == ("accuracy" if task.classes else "r2")
        for split, examples in splits.items():
            assert len(examples) == (len(examples) if task.reads_files else getattr(task, split))
            batch = examples.batch(np.arange(len(examples))[::-1].copy())
            shape = (len(examples), 2)[: task.towers]
            assert batch.inputs.shape[: task.towers] == shape == batch.lengths.shape
            assert np.array_equal(batch.lengths, examples.lengths[::-1])
            assert batch.lengths.min() >= 1 and batch.lengths.max() <= task.length
            if task.vocabulary:
                assert batch.inputs.dtype == np.int64 and batch.inputs.max() < task.vocabulary
                padding = np.arange(batch.inputs.shape[-1]) >= batch.lengths[..., None]
                assert not batch.inputs[padding].any()
            else:
                assert batch.inputs.shape[1:] == (task.length, task.channels)
                assert batch.inputs.dtype == np.float32
            if task.classes:
                assert batch.labels.min() >= 0 and batch.labels.max() < task.classes
            else:
                assert batch.labels.shape == (len(examples), task.scored)
            with pytest.raises(IndexError):
                examples.batch(np.array([len(examples)]))

    def test_rows_are_the_same_after_a_restart_and_not_made_again(self, loaded, monkeypatch):
        task, place, splits = loaded
        if isinstance(task, StoredTask):
            monkeypatch.setattr(type(task), "make", None)
        options = {k: v for k, v in task.describe().items() if k not in ("task", "version")}
        assert long_range.TASKS.get(task.name).make(options) == task
        for split, examples in splits.items():
            again = task.load(split, place)
            assert contents(again) == contents(examples) and again.origin == examples.origin

    def test_no_row_is_in_two_splits(self, loaded):
        task, _, splits = loaded
        seen = {split: set(contents(rows)) for split, rows in splits.items()}
        if task.name == "aan" or getattr(task, "source", "") == "official":
            assert seen["train"] == seen["validation"] == seen["test"]  # as our files are
            return
        assert not seen["train"] & seen["test"] and not seen["train"] & seen["validation"]
        is_test = getattr(task, "protocol", "") == "lra"
        assert seen["validation"] & seen["test"] == (seen["test"] if is_test else set())

    def test_every_row_has_its_own_inputs_unless_they_are_exchanged(self, loaded):
        _, _, splits = loaded
        rows, count = splits["train"], len(splits["train"])
        plain, order = contents(rows), np.roll(np.arange(count), 1)
        exchanged = contents(rows.exchanged(order))
        labels = splits["train"].labels
        for row, (inputs, label) in enumerate(exchanged):
            assert inputs == plain[order[row]][0]
            assert labels is None or label == plain[row][1]
        few, more = (set(contents(rows.subset(n, 3))) for n in (min(count, 5), count))
        assert few <= more == set(plain)


@pytest.mark.parametrize("text", GENERATED)
def test_answers_follow_from_generated_rows(text, tmp_path):
    task = long_range.make_task(text)
    examples = task.load("train", Place(cache=tmp_path))
    batch = examples.batch(np.arange(len(examples)))
    assert derived(task, batch) == pytest.approx(batch.labels, abs=1e-5)
    other = long_range.make_task(f"{text},seed=1").load("train", Place(cache=tmp_path))
    assert not set(contents(other)) & set(contents(examples))


def test_every_task_is_here():
    assert {case[0].partition(":")[0] for case in RECALL} == {*recall.TASKS.names()}
    names = {text.partition(":")[0] for text in (*GENERATED, *READ)}
    assert names == {*long_range.TASKS.names()}


def test_generators_keep_their_rows(tmp_path):
    """Other rows need another `version`, and other numbers here."""
    task = long_range.make_task(GENERATED[0])
    rows = contents(task.load("train", Place(cache=tmp_path)))
    found = hashlib.sha256(b"".join(sorted(x + y for x, y in rows))).hexdigest()[:16]
    assert (ListOps.version, found) == (1, "5837007149d83617")
    first = long_range.make_task("cumsum:seq_len=16").load("train").batch(np.array([7]))
    wanted = [-0.6554977, -0.3495613, -0.7215571]
    assert first.inputs[0, :3, 0].tolist() == pytest.approx(wanted, abs=1e-6)
