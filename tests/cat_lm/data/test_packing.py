"""Best-fit packing: every token once an epoch, documents whole where they fit, labels in them."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data import TrainLoader, verified
from cat_lm.data.best_fit import CUT, FIRST, PIECE, best_fit, pack
from cat_lm.data.opening import open_corpus
from cat_lm.data.packing import PackedWindows
from tests.prepared_data import EOD, random_documents, write_prepared

T = 16


@pytest.fixture(params=[10**9, 60])
def corpus(request, tmp_path):
    """Documents from one token (an EOD) to six windows, in one shard and in many."""
    documents = [[EOD], *random_documents(120, 3 * T), [*range(30_001, 30_001 + 6 * T), EOD], [EOD]]
    documents += [[*range(40_001, 40_000 + T), EOD], [*range(50_001, 50_000 + 2 * T), EOD]]
    write_prepared(tmp_path / "data", documents, shard_tokens=request.param)
    return open_corpus(tmp_path / "data", "train")


def documents_of(corpus):
    return [corpus.tokens(*corpus.document(i)).tolist() for i in range(corpus.num_documents)]


def epoch(corpus, mask_documents=False):
    """All windows of an epoch, as the loader serves them in steps of seven."""
    loader = TrainLoader(corpus, T, 1, 3, mask_documents, "best_fit")
    return loader._windows.read(np.arange(loader.samples_per_epoch), mask_documents)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_every_prediction_within_a_document_is_made_exactly_once(corpus, mask_documents):
    batch = epoch(corpus, mask_documents)
    pairs = Counter(zip(batch["input_ids"].ravel(), batch["labels"].ravel(), strict=True))
    pairs = Counter({(a, b): n for (a, b), n in pairs.items() if b != IGNORE_INDEX and a != EOD})
    expected = Counter(pair for document in documents_of(corpus) for pair in pairwise(document))
    assert pairs == expected


def test_after_an_eod_only_the_first_token_of_a_whole_document_is_a_label(corpus):
    batch = epoch(corpus)
    after = batch["labels"][batch["input_ids"] == EOD]
    firsts = Counter(document[0] for document in documents_of(corpus))
    found = Counter(after[after != IGNORE_INDEX].tolist())
    assert sum(found.values()) > 40 and not found - firsts
    masked = epoch(corpus, mask_documents=True)
    assert (masked["labels"][masked["input_ids"] == EOD] == IGNORE_INDEX).all()


def test_windows_hold_whole_documents_and_nothing_else(corpus):
    """Each window is taken apart by its document ids: documents, long ones' parts, padding."""
    batch = epoch(corpus, mask_documents=True)
    documents = documents_of(corpus)
    parts = Counter()
    for document in documents:
        for start in range(0, len(document), T):
            parts[tuple(document[start : start + T])] += 1
    for ids, labels, numbers in zip(*batch.values(), strict=True):
        assert numbers[0] == 0 and set(np.diff(numbers)) <= {0, 1}
        for number in range(numbers[-1] + 1):
            part = tuple(ids[numbers == number].tolist())
            if parts[part]:
                parts[part] -= part != (EOD,)  # which padding may look like
                continue
            # What is no document is padding: at the end, without a label.
            assert set(part) == {EOD} and number == numbers[-1]
            assert (labels[numbers == number] == IGNORE_INDEX).all()
    del parts[EOD,]
    assert not +parts


def naive_best_fit(lengths, capacity):
    rooms, touched, windows = [], [], [0] * len(lengths)
    for time, item in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [w for w in range(len(rooms)) if rooms[w] >= lengths[item]]
        if not fitting:
            rooms.append(capacity)
            touched.append(0)
            fitting = [len(rooms) - 1]
        # Of windows with equal room, the one that got it last.
        window = min(fitting, key=lambda w: (rooms[w], -touched[w]))
        windows[item], touched[window] = window, time
        rooms[window] -= lengths[item]
    return windows


@given(capacity=st.integers(1, 40), data=st.data())
def test_best_fit_is_best_fit(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    windows = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert windows.tolist() == naive_best_fit(lengths, capacity)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 32))
def test_pieces_are_all_tokens_once_in_windows_that_hold_them(lengths, capacity):
    ends = np.cumsum(lengths)
    pieces, counts = pack(ends - lengths, np.array(lengths), capacity)
    sizes, flags = pieces["packed"] >> 2, pieces["packed"] & 3
    tokens = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(pieces["start"], sizes, strict=True)]
    )
    assert np.sort(tokens).tolist() == list(range(ends[-1]))
    assert max(map(sum, np.split(sizes, np.cumsum(counts)[:-1]))) <= capacity
    firsts = np.isin(pieces["start"], ends - lengths)
    assert ((flags & FIRST > 0) == firsts).all()
    assert ((flags & CUT > 0) == ~np.isin(pieces["start"] + sizes, ends)).all()


def test_the_packing_is_frozen():
    """A change here changes what every resumed run trains on."""
    lengths = np.random.default_rng(3).integers(1, 40, 12)
    pieces, counts = pack(np.cumsum(lengths) - lengths, lengths, 16)
    assert counts.tolist() == FROZEN[0]
    assert list(zip(pieces["start"].tolist(), pieces["packed"].tolist(), strict=True)) == FROZEN[1]


FROZEN = (
    [1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 2, 2],
    [
        (0, 67),
        (16, 64),
        (61, 67),
        (77, 64),
        (93, 67),
        (109, 66),
        (127, 67),
        (169, 67),
        (150, 9),
        (156, 53),
        (185, 4),
        (32, 17),
        (43, 41),
        (125, 8),
        (36, 29),
        (53, 33),
        (143, 28),
        (152, 17),
    ],
)


def test_the_plan_is_kept_and_read_again(corpus):
    first = epoch(corpus)
    (plan,) = [p for p in (corpus.folder / "packing").iterdir() if p.is_dir()]
    before = {path.name: path.stat().st_mtime_ns for path in plan.iterdir()}
    assert (epoch(corpus)["labels"] == first["labels"]).all()
    assert {path.name: path.stat().st_mtime_ns for path in plan.iterdir()} == before
    PackedWindows(corpus, T + 1)
    assert len([p for p in (corpus.folder / "packing").iterdir() if p.is_dir()]) == 2


def damage(plan, what):
    if what == "cut short":
        with open(plan / "pieces.bin", "rb+") as stream:
            stream.truncate(24)
    elif what == "no description":
        (plan / "plan.json").unlink()
    elif what == "of other data":
        text = json.loads((plan / "plan.json").read_text()) | {"fingerprint": "another"}
        (plan / "plan.json").write_text(json.dumps(text))
    elif what == "other windows":  # of numbers that could be a plan's
        pieces = np.fromfile(plan / "pieces.bin", PIECE)
        pieces["start"] = (pieces["start"] ^ 1) % pieces["start"].max()
        pieces.tofile(plan / "pieces.bin")
    else:
        file = plan / what
        file.write_bytes(b"\x7f" * file.stat().st_size)


@pytest.mark.parametrize(
    "what",
    [
        *("cut short", "no description", "of other data", "other windows"),
        *("pieces.bin", "windows.bin"),
    ],
)
def test_a_damaged_plan_is_an_error_that_says_what_to_delete(corpus, what):
    epoch(corpus)
    (plan,) = [p for p in (corpus.folder / "packing").iterdir() if p.is_dir()]
    damage(plan, what)
    with pytest.raises(UserError, match=rf"{plan.name}: the packing plan is damaged; delete"):
        epoch(corpus)


def test_plan_is_hashed_once_for_each_copy(corpus, tmp_path, monkeypatch):
    hashed = []
    real = verified.checksums
    monkeypatch.setattr(
        verified, "checksums", lambda paths, *more: hashed.extend(paths) or real(paths, *more)
    )
    epoch(corpus)
    hashed.clear()
    epoch(corpus)
    assert hashed == []  # its maker has read it again
    shutil.copytree(corpus.folder, tmp_path / "copy")
    copy = open_corpus(tmp_path / "copy", "train")
    epoch(copy)
    assert sorted(path.name for path in hashed) == ["pieces.bin", "windows.bin"]
    epoch(copy)
    assert len(hashed) == 2


def test_data_that_cannot_be_written_to_have_their_plan_in_the_cache(corpus, tmp_path):
    # A file where the folder would be: unlike permissions, it stops root too.
    (corpus.folder / "packing").write_text("")
    windows = PackedWindows(corpus, T, tmp_path / "cache")
    assert list((tmp_path / "cache/packing").glob("train-16-v2-*/pieces.bin"))
    assert windows.num_windows == PackedWindows(corpus, T, tmp_path / "cache").num_windows


def test_processes_that_start_together_make_one_plan(corpus):
    code = "import sys; from cat_lm.data import TrainLoader, open_corpus\n"
    code += "c = open_corpus(sys.argv[1], 'train')\n"
    code += "print(TrainLoader(c, 16, 4, 0, packing='best_fit').batch(9)['labels'].sum())"
    command = [sys.executable, "-c", code, str(corpus.folder)]
    bars = os.environ | {"TQDM_DISABLE": ""}  # a plan's bar tells who makes it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": bars}
    started = [subprocess.Popen(command, **pipes) for _ in range(3)]
    outputs = [process.communicate() for process in started]
    assert all(process.returncode == 0 for process in started), outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("packing:" in error for _, error in outputs) == 1
