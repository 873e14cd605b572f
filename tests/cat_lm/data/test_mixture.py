"""Mixtures: exact in every block, the same for any number of ranks, each corpus in epochs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data import TrainLoader, ValidationWindows
from cat_lm.data.corpus import BLOCK, Mixture, block_counts
from cat_lm.data.opening import open_corpus
from cat_lm.data.shuffle import EpochOrder, MixtureOrder
from tests.prepared_data import random_documents, write_prepared

T = 8


def corpora(folder, count=3, split="train"):
    opened = []
    for i in range(count):
        path = folder / f"c{i}"
        if not path.exists():
            texts = random_documents(40 + 25 * i, 30, seed=i, shift=1 + 10_000 * i)
            held_out = random_documents(5 + 9 * i, 30, seed=9 + i, shift=1 + 10_000 * i)
            dtype = ("uint16", "int32")[i % 2]
            write_prepared(path, texts, held_out, dtype, unigram_loss=1.0 + i)
        opened.append(open_corpus(path, split))
    return opened


def loader_of(folder, weights=(0.5, 0.3, 0.2), batch=12, seed=1, **more):
    return TrainLoader(Mixture(corpora(folder, len(weights)), weights), T, batch, seed, **more)


def sources(loader, positions):
    """Which part of the mixture each position draws from, and which of its windows."""
    loader = TrainLoader(loader.corpus, T, positions, loader.seed)
    sizes = [TrainLoader(part, T, 1, 0).samples_per_epoch for part in loader.corpus.parts]
    ids = loader.sample_ids(0)
    ends = np.cumsum(sizes)
    owners = np.searchsorted(ends, ids, side="right")
    return owners, ids - (ends - sizes)[owners], sizes


def test_every_block_holds_each_corpus_exactly(tmp_path):
    loader = loader_of(tmp_path)
    owners, _, _ = sources(loader, 3 * BLOCK)
    blocks = owners.reshape(3, BLOCK)
    for block in blocks:
        assert np.bincount(block).tolist() == loader.corpus.counts
    assert sorted(loader.corpus.counts) == [2000, 3000, 5000]
    assert (blocks[0] != blocks[1]).mean() > 0.5  # shuffled anew in each block
    # Within a block too, every stretch has about its share.
    for stretch in blocks[0].reshape(10, -1):
        assert np.abs(np.bincount(stretch, minlength=3) * 10 - loader.corpus.counts).max() < 600


def test_each_corpus_goes_through_its_own_epochs_in_new_orders(tmp_path):
    loader = loader_of(tmp_path)
    owners, windows, sizes = sources(loader, BLOCK)
    for part, size in enumerate(sizes):
        own = windows[owners == part]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) > 3
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs.tolist())
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)
        # It is the order that the corpus has on its own.
        alone = TrainLoader(loader.corpus.parts[part], T, len(own), loader.seed)
        assert (own == alone.sample_ids(0)).all()


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_the_order_does_not_depend_on_the_ranks(tmp_path, world_size, packing):
    loader = loader_of(tmp_path, packing=packing, mask_documents=True)
    for step in (0, 1, BLOCK // 12, 5 * BLOCK // 12, 123_456_789):
        whole = loader.batch(step)
        parts = [loader.batch(step, rank, world_size) for rank in range(world_size)]
        for key in ("input_ids", "labels", "document_ids"):
            assert (np.concatenate([part[key] for part in parts]) == whole[key]).all()


def test_rows_come_from_the_corpora_that_the_order_names(tmp_path):
    loader = loader_of(tmp_path, batch=600)
    batch = loader.batch(7)
    ids = loader.sample_ids(7)
    first = 0
    for part in loader.corpus.parts:
        alone = TrainLoader(part, T, 1, 0)
        rows = (first <= ids) & (ids < first + alone.samples_per_epoch)
        expected = np.stack([part.tokens(i * T, i * T + T + 1) for i in ids[rows] - first])
        assert rows.any()
        assert (batch["input_ids"][rows] == expected[:, :-1]).all()
        assert (batch["labels"][rows] == expected[:, 1:]).all()
        first += alone.samples_per_epoch


def test_the_order_of_a_mixture_is_frozen(tmp_path):
    """A change here changes what every resumed run trains on."""
    loader = loader_of(tmp_path, batch=6, seed=7)
    assert loader.sample_ids(0).tolist() == FROZEN[0]
    assert loader.sample_ids(20_000).tolist() == FROZEN[1]


FROZEN = ([38, 127, 90, 27, 6, 32], [23, 19, 35, 7, 29, 17])


def test_the_fingerprint_follows_the_folders_and_the_proportions_only(tmp_path):
    parts = corpora(tmp_path)
    same = Mixture(parts, [0.5, 0.3, 0.2]).fingerprint
    assert same == Mixture(parts, [5, 3, 2]).fingerprint
    assert same == Mixture(parts[::-1], [2, 3, 5]).fingerprint
    assert same != Mixture(parts, [3, 5, 2]).fingerprint
    assert same != Mixture(parts[:2], [5, 3]).fingerprint
    thirds = [Mixture(order, [1, 1, 1]) for order in (parts, parts[::-1])]
    assert thirds[0].fingerprint == thirds[1].fingerprint  # ties do not follow the order either


SOURCES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


@given(sources=SOURCES, key=st.text(), blocks=st.integers(1, 9), more=st.integers(0, 30))
def test_blocks_of_a_mixture_hold_each_source_by_its_count_and_order(sources, key, blocks, more):
    """Sources are given as (windows, count in a block)."""
    sizes, counts = map(list, zip(*sources, strict=True))
    orders = [EpochOrder(size, f"{i}", 3) for i, size in enumerate(sizes)]
    order, size = MixtureOrder(orders, counts, key), sum(counts)
    ids = order(np.arange(blocks * size + more))
    owners = np.searchsorted(np.cumsum(sizes), ids, side="right")
    for block in owners[: blocks * size].reshape(blocks, size):
        assert np.bincount(block, minlength=len(counts)).tolist() == counts
    assert order.count_draws(len(ids)) == np.bincount(owners, minlength=len(counts)).tolist()
    for source, own in enumerate(orders):
        drawn = ids[: blocks * size][owners[: blocks * size] == source]
        assert (np.sort(drawn - sum(sizes[:source])) == np.sort(own(np.arange(len(drawn))))).all()
    assert order(np.arange(len(ids))[::-1]).tolist() == ids[::-1].tolist()


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9))
def test_counts_are_the_shares_rounded(weights):
    counts = block_counts("abcdefghi"[: len(weights)], weights)
    assert sum(counts) == BLOCK
    assert np.abs(np.array(counts) - BLOCK * np.array(weights) / sum(weights)).max() < 1 + 1e-6


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((1,), [BLOCK]),
        ((0.5, 0.5), [5000, 5000]),
        ((1, 1, 1), [3334, 3333, 3333]),
        ((0.1, 0.2, 0.7), [1000, 2000, 7000]),
        ((1e-4, 1 - 1e-4), [1, 9999]),
        ((6e-5, 1), [1, 9999]),
        ((1e300, 1e300), [5000, 5000]),
    ],
)
def test_largest_remainder(weights, counts):
    assert block_counts("abcdef"[: len(weights)], weights) == counts


def test_a_weight_that_comes_to_nothing_is_an_error():
    with pytest.raises(UserError, match=r"the weight 1e-05 of b is 1e-05 of all, less than one"):
        block_counts("ab", [1, 1e-5])


def test_parts_that_do_not_go_together(tmp_path):
    parts = corpora(tmp_path, 2)
    other = write_prepared(tmp_path / "other", random_documents(9, 30), tokenizer="another")
    with pytest.raises(UserError, match=r"c0 and .*other were prepared with different tokenizers"):
        Mixture([parts[0], open_corpus(other, "train")], [1, 1])
    with pytest.raises(UserError, match=r"c1 and .*c1 hold the same data"):
        Mixture([parts[0], parts[1], parts[1]], [1, 1, 1])


def test_attributes_are_those_of_all_parts(tmp_path):
    parts = corpora(tmp_path)
    mixture = Mixture(parts, [1, 2, 3])
    assert mixture.num_tokens == sum(part.num_tokens for part in parts)
    assert mixture.num_documents == 40 + 65 + 90
    assert mixture.folder in [part.folder for part in parts]
    held_out = [part.manifest["splits"]["validation"]["tokens"] for part in parts]
    expected = np.average([1.0, 2.0, 3.0], weights=held_out)
    assert mixture.manifest["unigram_loss"] == pytest.approx(expected)


def test_validation_covers_every_part_and_any_beginning_is_a_fair_sample(tmp_path):
    parts = corpora(tmp_path, 3, "validation")
    mixture = Mixture(parts, [1, 1, 8])
    windows = ValidationWindows(mixture, T)
    labels = windows.batch(range(len(windows)))["labels"]
    scored = sorted(labels[labels != IGNORE_INDEX].tolist())
    expected = sorted(np.concatenate([p.tokens(1, p.num_tokens) for p in parts]).tolist())
    assert scored == expected
    counts = [len(ValidationWindows(part, T)) for part in mixture.parts]
    owners = np.repeat(np.arange(len(counts)), counts)[windows._order]
    half = np.bincount(owners[: len(windows) // 2])
    assert np.abs(half - np.array(counts) / 2).max() <= 1
    assert (windows.batch([3])["labels"] == labels[3:4]).all()
