"""Data at an address: served right while they are copied, copied whole or not at all, shared."""

import json
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from fsspec.registry import known_implementations

from cat_lm.core.errors import UserError
from cat_lm.data import TokenCorpus, TrainLoader, ValidationWindows
from cat_lm.data.corpus import Mixture
from cat_lm.data.opening import open_corpus, open_verified
from cat_lm.data.remote import Storage
from tests.cat_lm.data.web_server import served
from tests.prepared_data import random_documents, write_prepared

T = 16


@pytest.fixture
def local(tmp_path):
    folder = tmp_path / "prepared"
    return write_prepared(folder, random_documents(150, 40), [[7, 8, 9, 0]] * 9, shard_tokens=200)


@pytest.fixture
def memory(local):
    """The same data at memory://data."""
    fs = fsspec.filesystem("memory")
    fs.put(str(local), "/data", recursive=True)
    yield "memory://data"
    fs.rm("/data", recursive=True)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("cat_lm.core.errors.FIRST_WAIT", 0.0001)


def are_here(corpus):
    missing = {entry["name"] for entry in corpus.missing(corpus.entries)}
    return [shard.name not in missing for shard in corpus.shards]


def batches(corpus, steps=6, **more):
    loader = TrainLoader(corpus, T, 8, 0, **more)
    return np.stack([loader.batch(step)["labels"] for step in range(steps)])


def test_the_same_batches_from_copies(local, memory, tmp_path):
    expected = batches(open_corpus(local, "train"))
    corpus = open_corpus(memory, "train", tmp_path / "cache")
    assert f"its copies are in {tmp_path}" in corpus.describe()[-1]
    assert not any(are_here(corpus))
    assert (corpus.tokens(0, 4) == open_corpus(local, "train").tokens(0, 4)).all()
    assert are_here(corpus) == [True] + [False] * (len(corpus.shards) - 1)  # what was read
    corpus.fetch()
    assert all(are_here(corpus))
    assert (batches(corpus) == expected).all()
    fsspec.filesystem("memory").rm("/data/train-00000.bin")  # from here on the copies serve
    assert (batches(corpus) == expected).all()
    fsspec.filesystem("memory").touch("/data/train-00000.bin")
    # The cache has become a prepared folder of its own, but for the split that nobody read.
    assert (batches(TokenCorpus(corpus.folder, "train", corpus.manifest)) == expected).all()
    for shard in corpus.shards:
        for suffix in (".bin", ".idx"):
            name = shard.name + suffix
            assert (corpus.folder / name).read_bytes() == (local / name).read_bytes()
    assert not list(corpus.folder.glob("*.tmp")) and not list(corpus.folder.glob(".*.tmp"))


def test_opening_reads_no_shard(local, tmp_path):
    with served(local) as (server, url):
        corpus = open_corpus(url, "train", tmp_path / "cache")
        assert {name for name, _ in server.requests if "train" in name} == set()
        names = ("num_tokens", "num_documents", "num_bytes", "fingerprint", "vocab_size", "eod_id")
        own = open_corpus(local, "train")
        assert [getattr(corpus, n) for n in names] == [getattr(own, n) for n in names]
        assert (corpus.folder / "tokenizer/tokenizer.json").read_text() == "t"
        assert corpus.name == url


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_server_that_fails_a_third_of_the_time(local, tmp_path, packing, caplog):
    expected = batches(open_corpus(local, "train"), packing=packing)
    with served(local, trouble=0.33) as (_, url):
        corpus = open_corpus(url, "train", tmp_path / "cache")
        assert (batches(corpus, packing=packing) == expected).all()
        held_out = open_corpus(url, "validation", tmp_path / "cache")
        assert (ValidationWindows(held_out, T).batch([0])["input_ids"][0, :4] == [7, 8, 9, 0]).all()
    assert any("; again in" in record.message for record in caplog.records)


def test_remote_manifest_of_other_shards_is_refused_before_it_names_a_folder(memory, tmp_path):
    fs = fsspec.filesystem("memory")
    path = f"{memory.removeprefix('memory:/')}/manifest.json"
    manifest = json.loads(fs.cat_file(path)) | {"fingerprint": "0" * 64}
    fs.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(UserError, match="fingerprint does not belong to its shards"):
        open_corpus(memory, "train", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_copied_tokenizer_that_changed_is_copied_again(memory, tmp_path):
    corpus = open_corpus(memory, "train", tmp_path)
    (corpus.folder / "tokenizer/tokenizer.json").write_text("another")
    open_verified(memory, "train", tmp_path)
    assert (corpus.folder / "tokenizer/tokenizer.json").read_text() == "t"


def test_a_mixture_of_remote_and_local_data(local, memory, tmp_path):
    other = write_prepared(tmp_path / "other", random_documents(70, 40, seed=5))

    def mixed(first):
        opened = (open_corpus(f, "train", tmp_path / "cache") for f in (first, other))
        return Mixture(list(opened), [0.5, 0.5])

    assert mixed(memory).fingerprint == mixed(local).fingerprint
    assert (batches(mixed(memory)) == batches(mixed(local))).all()


def damage(url, suffix):
    fs = fsspec.filesystem("memory")
    path = f"{url.removeprefix('memory:/')}/train-00002{suffix}"
    data = bytearray(fs.cat_file(path))
    data[-3] ^= 1
    fs.pipe_file(path, bytes(data))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_remote_file_that_is_damaged_ends_the_run(memory, tmp_path, suffix):
    damage(memory, suffix)
    corpus = open_corpus(memory, "train", tmp_path)
    message = rf"memory://data/train-00002\{suffix}: its SHA-256 is not the manifest's"
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            corpus.fetch()
        assert not (corpus.folder / f"train-00002{suffix}").exists()
    with pytest.raises(UserError, match=message):
        corpus.shards[2].read(0, 1)


def test_copies_that_changed_are_found_and_copied_anew(local, memory, tmp_path):
    corpus = open_corpus(memory, "train", tmp_path)
    corpus.fetch()
    expected = batches(corpus)
    path = corpus.folder / "train-00001.bin"
    good = path.read_bytes()
    for bad in (good[:-2], good[:-2] + b"\1\1", b""):
        path.write_bytes(bad)
        again = open_corpus(memory, "train", tmp_path)
        assert are_here(again)[:2] == [True, False]
        again.fetch()
        assert (batches(again) == expected).all()
        assert all(are_here(again)) and path.read_bytes() == good


def test_what_a_killed_copy_left_is_not_taken_for_whole(memory, tmp_path):
    corpus = open_corpus(memory, "train", tmp_path)
    (corpus.folder / ".train-00000.bin.killed.tmp").write_bytes(b"half")
    (corpus.folder / "train-00001.bin").write_bytes(b"renamed, but not yet noted")
    assert are_here(corpus)[:2] == [False, False]
    corpus.fetch()
    assert all(are_here(corpus))
    assert not list(corpus.folder.glob(".*.tmp"))


def test_processes_share_the_copies(local, tmp_path):
    code = "import sys; from cat_lm.data import TrainLoader, open_corpus\n"
    code += "c = open_corpus(sys.argv[1], 'train', sys.argv[2])\n"
    code += "c.fetch()\n"
    code += "print(TrainLoader(c, 16, 8, 0).batch(3)['labels'].sum())"
    with served(local) as (server, url):
        command = [sys.executable, "-c", code, url, str(tmp_path / "cache")]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        outputs = [process.communicate(timeout=300) for process in started]
        assert all(process.returncode == 0 for process in started), outputs
        assert len({out for out, _ in outputs}) == 1
        copied = [name for name, _ in server.requests if name.endswith(".idx")]
        assert len(copied) == len(set(copied)) > 5  # once each, not once a process


def test_wrong_addresses(local, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"memory://nowhere: holds no finished data \(no manifest"):
        open_corpus("memory://nowhere", "train", tmp_path)
    with pytest.raises(UserError, match=r"nonsense://x/y: cannot be read here \(Proto"):
        Storage("nonsense://x/y")
    with pytest.raises(UserError, match=r"zz://bucket.*cannot be read here \(pip install zzfs"):
        known = {"class": "zz_is_not_there.FileSystem", "err": "pip install zzfs"}
        monkeypatch.setitem(known_implementations, "zz", known)
        Storage("zz://bucket/data")
    with pytest.raises(UserError, match="no split 'test'"), served(local) as (_, url):
        open_corpus(url, "test", tmp_path)


def test_refused_access_is_not_retried(local, tmp_path):
    for status in (401, 403):
        with served(local, status=status) as (server, url):
            with pytest.raises(UserError, match=r"manifest.json: access is refused .* credentials"):
                open_corpus(url, "train", tmp_path)
            assert len(server.requests) == 1


def test_an_outage_in_the_middle_ends_the_run_but_not_for_good(local, memory, tmp_path):
    """The error is none of bad input, so that the job script starts the run again."""
    corpus = open_corpus(memory, "train", tmp_path)
    loader = TrainLoader(corpus, T, 8, 0)
    expected = batches(open_corpus(local, "train"))

    def fail(*_, **__):
        raise TimeoutError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus._storage._fs, "cat_file", fail)
        with pytest.raises(ConnectionError, match="10 attempts"):
            loader.batch(0)
    assert (batches(open_corpus(memory, "train", tmp_path)) == expected).all()


def test_a_server_without_ranges_is_told(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("cat_lm.data.remote.CHUNK", 64)
    corpus = open_corpus(memory, "train", tmp_path)
    cat = corpus._storage._fs.cat_file
    monkeypatch.setattr(corpus._storage._fs, "cat_file", lambda name, **_: cat(name))
    with pytest.raises(UserError, match="the server sends whole files only"):
        corpus.fetch()
