"""The loader: pure in (data, seed, step, rank, world size), each window once an epoch, labels."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data import TrainLoader, ValidationWindows
from cat_lm.data.shuffle import Permutation


class Stream:
    """A corpus in memory."""

    name, split, eod_id = "memory", "train", 0

    def __init__(self, tokens, fingerprint="f"):
        self._tokens = np.asarray(tokens, dtype=np.int64)
        self.num_tokens = len(self._tokens)
        self.fingerprint = fingerprint
        self.parts = [self]

    def gather(self, starts, stops):
        assert all(0 <= a <= b <= self.num_tokens for a, b in zip(starts, stops, strict=True))
        return [self._tokens[a:b] for a, b in zip(starts, stops, strict=True)]


def counting(length):
    """Tokens that tell their own position (and hold no EOD)."""
    return Stream(np.arange(1, length + 1))


@given(size=st.integers(1, 5000), key=st.text(), data=st.data())
def test_permutation_is_one_to_one_and_computed_point_by_point(size, key, data):
    values = Permutation(size, key)(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))
    some = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=9)))
    assert (Permutation(size, key)(some) == values[some]).all()


def test_permutation_mixes_and_depends_on_its_key():
    size = 10_000
    first, second = (Permutation(size, key)(np.arange(size)) for key in ("a", "b"))
    for values in (first, second):
        # Ranks of a random order: no correlation, fixed points and neighbours are rare.
        assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < 0.05
        assert (values == np.arange(size)).sum() < 10
        assert (np.abs(np.diff(values)) == 1).sum() < 20
        # Each tenth of the input is spread evenly over the tenths of the output.
        spread = np.histogram2d(np.arange(size), values, bins=10)[0]
        assert spread.min() > 50 and spread.max() < 150
    assert (first == second).mean() < 0.01


@given(
    tokens=st.integers(2, 400),
    length=st.integers(1, 40),
    batch=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_every_epoch_has_each_window_once(tokens, length, batch, seed):
    tokens += length
    loader = TrainLoader(counting(tokens), length, batch, seed)
    size = (tokens - 1) // length
    assert loader.samples_per_epoch == size
    ids = np.concatenate([loader.sample_ids(step) for step in range(-(-3 * size // batch))])
    for epoch in ids[: 3 * size].reshape(3, size):
        assert sorted(epoch.tolist()) == list(range(size))


def test_every_epoch_has_a_new_order():
    loader = TrainLoader(counting(101), context_length=4, global_batch_size=25, seed=1)
    assert len({tuple(loader.sample_ids(epoch)) for epoch in range(4)}) == 4


def test_labels_are_the_next_tokens():
    corpus = counting(101)
    loader = TrainLoader(corpus, context_length=7, global_batch_size=6, seed=3)
    batch = loader.batch(2)
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "input_ids": ((6, 7), np.int64),
        "labels": ((6, 7), np.int64),
    }
    assert (batch["labels"] == batch["input_ids"] + 1).all()
    assert (batch["input_ids"][:, 0] == 7 * loader.sample_ids(2) + 1).all()


@given(world_size=st.integers(1, 12), share=st.integers(1, 5), step=st.integers(0, 10**12))
def test_ranks_share_a_batch_that_does_not_depend_on_them(world_size, share, step):
    loader = TrainLoader(counting(500), 8, world_size * share, seed=0)
    whole = loader.batch(step)
    parts = [loader.batch(step, rank, world_size) for rank in range(world_size)]
    for key in whole:
        assert (np.concatenate([part[key] for part in parts]) == whole[key]).all()


def test_batches_are_pure_and_depend_on_seed_and_data():
    def ids(step, seed=0, fingerprint="f"):
        corpus = Stream(np.arange(1, 1001), fingerprint)
        return TrainLoader(corpus, 4, 8, seed).sample_ids(step).tolist()

    loader = TrainLoader(counting(1000), 4, 8, seed=0)
    loader.batch(5)
    assert loader.sample_ids(31).tolist() == ids(31)  # nothing that was read before matters
    assert ids(31) != ids(32)
    assert ids(31) != ids(31, seed=1)
    assert ids(31) != ids(31, fingerprint="g")


def test_the_order_is_frozen():
    """A change here changes what every resumed run trains on."""
    loader = TrainLoader(counting(401), context_length=4, global_batch_size=6, seed=7)
    assert loader.sample_ids(0).tolist() == FROZEN[0]
    assert loader.sample_ids(20_000).tolist() == FROZEN[1]


FROZEN = ([59, 10, 47, 55, 53, 45], [48, 53, 20, 59, 7, 42])


def test_masked_documents():
    corpus = Stream([5, 0, 6, 7, 0, 0, 8, 9, 1])
    loader = TrainLoader(corpus, context_length=8, global_batch_size=1, seed=0, mask_documents=True)
    batch = loader.batch(0)
    assert batch["input_ids"].tolist() == [[5, 0, 6, 7, 0, 0, 8, 9]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]
    assert batch["labels"].tolist() == [[0, IGNORE_INDEX, 7, 0, IGNORE_INDEX, IGNORE_INDEX, 9, 1]]
    assert batch["document_ids"].dtype == np.int64
    plain = TrainLoader(corpus, context_length=8, global_batch_size=1, seed=0).batch(0)
    assert plain["labels"].tolist() == [[0, 6, 7, 0, 0, 8, 9, 1]]


def test_bad_arguments_are_refused():
    with pytest.raises(UserError, match="has 8 tokens, one window of context length 8 needs 9"):
        TrainLoader(counting(8), 8, 1, 0)
    TrainLoader(counting(9), 8, 1, 0)
    loader = TrainLoader(counting(100), 8, 6, 0)
    with pytest.raises(UserError, match="batch of 6 windows cannot be shared by 4 ranks"):
        loader.batch(0, 0, 4)
    for wrong in ((0, 2, 2), (0, -1, 2)):
        with pytest.raises(ValueError):
            loader.batch(*wrong)


@given(st.lists(st.integers(0, 3), min_size=9, max_size=60), st.integers(1, 8))
def test_document_ids_count_the_ends_before_a_token(tokens, length):
    loader = TrainLoader(Stream(tokens), length, 1, seed=0, mask_documents=True)
    batch = loader._windows.read(np.arange(loader.samples_per_epoch), True)
    plain = loader._windows.read(np.arange(loader.samples_per_epoch), False)
    assert (batch["input_ids"] == plain["input_ids"]).all()
    ends = batch["input_ids"] == Stream.eod_id
    assert (batch["document_ids"] == np.cumsum(ends, axis=1) - ends).all()
    assert (batch["labels"] == np.where(ends, IGNORE_INDEX, plain["labels"])).all()


@given(st.integers(2, 200), st.integers(1, 30), st.integers(1, 5))
def test_validation_scores_every_token_after_the_first_once(tokens, length, world_size):
    windows = ValidationWindows(counting(tokens), length)
    assert len(windows) == -(-(tokens - 1) // length)
    whole = windows.batch(range(len(windows)))
    scored = whole["labels"][whole["labels"] != IGNORE_INDEX]
    assert scored.tolist() == list(range(2, tokens + 1))
    assert (whole["input_ids"][whole["labels"] != IGNORE_INDEX] == scored - 1).all()
    assert (windows.batch([-1])["labels"] == whole["labels"][-1:]).all()
    ranks = [range(rank, len(windows), world_size) for rank in range(world_size)]
    labels = np.concatenate([windows.batch(rows)["labels"].ravel() for rows in ranks if rows])
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(2, tokens + 1))
    with pytest.raises(IndexError):
        windows.batch([len(windows)])


def test_validation_of_masked_documents_does_not_score_first_tokens():
    windows = ValidationWindows(Stream([5, 0, 6, 7, 0, 8]), 4, mask_documents=True)
    batch = windows.batch(range(2))
    assert batch["labels"].tolist() == [[0, IGNORE_INDEX, 7, 0], [IGNORE_INDEX] * 4]
    assert batch["document_ids"][0].tolist() == [0, 0, 1, 1]


def test_prefetch_gives_the_same_batches_in_order():
    loader = TrainLoader(counting(500), 8, 12, seed=0)
    with closing(loader.prefetch(5, 25, rank=1, world_size=2)) as batches:
        found = list(batches)
    assert len(found) == 20
    for step, batch in enumerate(found, 5):
        assert (batch["input_ids"] == loader.batch(step, 1, 2)["input_ids"]).all()
    assert list(loader.prefetch(7, 7)) == []


def test_errors_of_the_reader_come_where_their_batch_would():
    loader = TrainLoader(counting(500), 8, 2, seed=0)
    batch = loader.batch

    def failing(step, *rest):
        if step == 3:
            raise OSError("the disk has gone")
        return batch(step, *rest)

    loader.batch = failing
    batches = loader.prefetch(0, 10)
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(OSError, match="the disk has gone"):
        next(batches)
    assert list(batches) == []


def test_prefetch_threads_end_when_closed_or_dropped():
    def alive():
        return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())

    before = alive()
    loader = TrainLoader(counting(500), 8, 2, seed=0)
    batches = loader.prefetch(0, 10**9)
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []
    assert alive() == before
    dropped = loader.prefetch(0, 10**9)
    next(dropped)
    del dropped
    deadline = time.monotonic() + 5
    while alive() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive() == before
