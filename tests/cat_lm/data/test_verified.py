"""Shards against the manifest's checksums: once for every copy, by all ranks that see it, noted."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.data import TrainLoader, ValidationWindows, verified
from cat_lm.data.opening import open_corpus, open_verified
from cat_lm.data.verified import NOTE
from cat_lm.training.distributed import Ranks
from cat_lm.training.preflight.data import verify
from tests.prepared_data import random_documents, write_prepared
from tests.runs import run_values


@pytest.fixture
def folder(tmp_path):
    made = write_prepared(tmp_path / "data", random_documents(60, 40), shard_tokens=100)
    assert len(list(made.glob("*.bin"))) > 4
    return made


@pytest.fixture(autouse=True)
def hashed(monkeypatch):
    """The files that are read to the end, in their order."""
    found = []
    real = verified.checksums

    def counted(paths, *more):
        found.extend(path.name for path in paths)
        return real(paths, *more)

    monkeypatch.setattr(verified, "checksums", counted)
    return found


def names(folder, pattern="*-0*"):
    return sorted(path.name for path in folder.glob(pattern))


def test_each_file_is_read_once(folder, hashed):
    for split in ("train", "validation"):
        open_verified(folder, split)
    assert sorted(hashed) == names(folder)
    hashed.clear()
    open_verified(folder, "train")
    assert hashed == []


def zeroed(path):
    status = path.stat()
    with open(path, "r+b") as stream:
        stream.write(bytes(status.st_size // 2))
    return status


def test_a_zeroed_shard_is_named_and_not_noted(folder, hashed):
    zeroed(folder / "train-00001.bin")
    for _ in range(2):
        with pytest.raises(UserError, match=r"train-00001\.bin: its SHA-256 is not the mani"):
            open_verified(folder, "train")
    assert hashed.count("train-00001.bin") == 2


@pytest.mark.parametrize("name", ["train-00002.bin", "train-00002.idx"])
def test_what_was_touched_or_written_is_read_anew(folder, hashed, name):
    open_verified(folder, "train")
    hashed.clear()
    os.utime(folder / name, ns=(0, 123_456_789))
    open_verified(folder, "train")
    assert hashed == [name]
    with open(folder / name, "r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        stream.write(b"\xff")
    with pytest.raises(UserError, match="its SHA-256 is"):
        open_verified(folder, "train")


def test_a_copy_with_its_note_is_read_anew(folder, tmp_path, hashed):
    open_verified(folder, "train")
    hashed.clear()
    shutil.copytree(folder, tmp_path / "copy")  # times are kept, as by rsync -a
    open_verified(tmp_path / "copy", "train")
    assert sorted(hashed) == names(folder, "train-*")
    hashed.clear()
    os.rename(tmp_path / "copy", tmp_path / "moved")
    open_verified(tmp_path / "moved", "train")
    assert hashed == []


@pytest.mark.parametrize("damage", [b"{", b"[]\n", b"\xff\xfe\n", b'{"name": 1}\n', bytes(300)])
def test_a_damaged_note_counts_for_nothing(folder, hashed, damage):
    open_verified(folder, "train")
    whole = (folder / NOTE).read_bytes()
    (folder / NOTE).write_bytes(whole[:-20] + damage)  # the last line is torn
    hashed.clear()
    open_verified(folder, "train")
    assert len(hashed) == 1
    (folder / NOTE).write_bytes(damage)
    hashed.clear()
    open_verified(folder, "train")
    assert sorted(hashed) == names(folder, "train-*")


def test_where_nothing_can_be_written_the_cache_has_the_note(folder, tmp_path, hashed, monkeypatch):
    real = os.open

    def refused(path, flags, *more, **options):
        if Path(path) == folder / NOTE:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(verified.os, "open", refused)
    for _ in range(2):
        open_verified(folder, "train", tmp_path / "cache")
    assert sorted(hashed) == names(folder, "train-*")
    assert not (folder / NOTE).exists()
    assert len(list((tmp_path / "cache" / "verified").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "another", "differs from the tokenizer that made the data"),
        ("tokenizer.json", None, "no such file"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', 'eos_token is "<end>"'),
    ],
)
def test_another_tokenizer_in_the_folder_is_refused(tiny_corpus, tmp_path, name, content, message):
    data = shutil.copytree(tiny_corpus, tmp_path / "data")
    open_verified(data, "train")
    path = data / "tokenizer" / name
    path.write_text(content) if content else path.unlink()
    with pytest.raises(UserError, match=message):
        open_verified(data, "train")
    ranks = Together(1)
    (found,) = ranks.run(lambda rank: verify(config(data), ranks, print))
    assert message in str(found)


def test_a_packing_plan_is_not_made_of_a_damaged_index(folder):
    with open(folder / "train-00001.idx", "r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(bytes(8))
    with pytest.raises(UserError, match=r"train-00001\.idx: its SHA-256"):
        TrainLoader(open_corpus(folder, "train"), 16, 4, 0, packing="best_fit")
    assert not list((folder / "packing").glob("[a-z]*"))


def test_what_was_prepared_or_adopted_here_is_noted_by_its_maker(tmp_path, tiny_corpus, hashed):
    from data_prep.adopt import parse_arguments
    from data_prep.megatron.convert import adopt

    open_verified(tiny_corpus, "train")
    prefix = str(tiny_corpus / "train-00000")
    for link in ("hard", "copy"):
        out = tmp_path / link
        given = ["--tokenizer", "bytes", "--out", str(out), "--link", link]
        held_out = ["--validation", str(tiny_corpus / "validation-00000")]
        adopt(parse_arguments([prefix, *held_out, *given]))
        for split in ("train", "validation"):
            open_verified(out, split)
    assert hashed == []


class Together:
    """Ranks that are threads; `meet` gives every one of them what each has brought."""

    on_all_ranks = Ranks.on_all_ranks
    local_rank = 0  # each on a host of its own

    def __init__(self, size):
        self.world_size, self._barrier, self._brought = size, threading.Barrier(size), [None] * size
        self._own = threading.local()

    @property
    def rank(self):
        return self._own.rank

    @property
    def is_first(self):
        return self.rank == 0

    def gather(self, value):
        self._brought[self.rank] = value
        self._barrier.wait(30)
        found = list(self._brought)
        self._barrier.wait(30)
        return found

    def sum(self, *values):
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def run(self, action):
        """`action(rank)` in a thread for each rank: its result, or what it raised."""
        results = [None] * self.world_size

        def one(rank):
            self._own.rank = rank
            try:
                results[rank] = action(rank)
            except UserError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def config(folder):
    return RunConfig.model_validate(run_values(folder, "unused"))


def test_one_host_reads_a_copy_that_all_see(folder, hashed):
    ranks, read = Together(3), [[], [], []]
    lines = ranks.run(lambda rank: verify(config(folder), ranks, read[rank].append))
    assert sorted(hashed) == names(folder)
    assert all(found for found in read), "every watchdog hears of it"
    assert all(line.startswith(f"data: verified {len(hashed)} files") for (line,) in lines)
    assert ranks.run(lambda rank: verify(config(folder), ranks, print)) == [[], [], []]


def test_what_one_rank_finds_all_ranks_say(folder):
    zeroed(folder / "train-00001.bin")
    ranks = Together(2)
    found = ranks.run(lambda rank: verify(config(folder), ranks, lambda what: None))
    assert str(found[0]) == str(found[1])
    assert "train-00001.bin: its SHA-256 is" in str(found[0])


def spoil(folder, name, dtype, position, value):
    tokens = np.fromfile(folder / name, dtype)
    tokens[position] = value
    tokens.tofile(folder / name)


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint16", 65_535), ("int32", 100_000), ("int32", -1), ("int32", -100)]
)
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_ids_outside_of_the_vocabulary_are_named(tmp_path, dtype, value, packing):
    folder = write_prepared(tmp_path, random_documents(60, 40), [[1, 2, 3, 0]] * 9, dtype, 100)
    spoil(folder, "train-00001.bin", dtype, 7, value)
    corpus = open_corpus(folder, "train")
    message = rf"train-00001\.bin: token 7 is the id {value}, outside of the vocabulary of 60000"
    with pytest.raises(UserError, match=message):
        loader = TrainLoader(corpus, 16, 4, 0, packing=packing)
        for step in range(loader.samples_per_epoch // 4 + 1):
            loader.batch(step)
    with pytest.raises(UserError, match=message):
        corpus.tokens(0, corpus.num_tokens)


def test_the_last_label_is_looked_at_too(tmp_path):
    """It is no input of its window, and may be the only one that is wrong."""
    folder = write_prepared(tmp_path, [[1, 2, 3, 4, 0]], [[1, 2, 3, 4, 0]], "int32")
    for split in ("train", "validation"):
        for value in (-7, 60_000):
            spoil(folder, f"{split}-00000.bin", "int32", 4, value)
            corpus = open_corpus(folder, split)
            read = TrainLoader(corpus, 4, 1, 0).batch if split == "train" else None
            with pytest.raises(UserError, match=rf"token 4 is the id {value}"):
                read(0) if read else ValidationWindows(corpus, 4).batch([0])
