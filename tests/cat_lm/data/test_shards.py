"""Shards and the corpus: the format on disk, shard boundaries, damage, and size without weight."""

import errno
import json
import struct
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from cat_lm.data import shards
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    Shard,
    ShardWriter,
    index_bytes,
    token_dtype,
    write_index,
)
from tests.damages import damages
from tests.prepared_data import bare_manifest, write_prepared, write_shards

EOD = 0
DOCUMENTS = st.lists(
    st.lists(st.integers(1, 99), max_size=8).map(lambda ids: [*ids, EOD]), min_size=1, max_size=30
)


def corpus_of(folder, listed, dtype="uint16"):
    """A corpus as `prepare` would leave it, as far as reading it goes."""
    (folder / "manifest.json").write_text(json.dumps(bare_manifest(listed, 100, dtype)))
    return open_corpus(folder, "train")


def test_files_follow_the_public_description_byte_for_byte(tmp_path):
    write_shards(tmp_path, "train", [[5, 6, EOD], [EOD], [7, EOD]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8) + struct.pack("<QQ", 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8)
    expected += struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "train-00000.idx").read_bytes() == expected
    assert len(expected) == index_bytes(3)
    assert (tmp_path / "train-00000.bin").read_bytes() == struct.pack("<6H", 5, 6, 0, 0, 7, 0)


def test_large_vocabularies_are_stored_as_int32_which_megatron_has_a_code_for(tmp_path):
    assert token_dtype(65_535) == np.dtype("<u2")
    assert token_dtype(65_536) == np.dtype("<i4")
    write_shards(tmp_path, "train", [[70_000, EOD]], "int32")
    assert (tmp_path / "train-00000.idx").read_bytes()[17] == 4
    assert Shard(tmp_path / "train-00000").tokens.tolist() == [70_000, 0]


def test_pointers_of_a_shard_beyond_two_gigabytes_do_not_wrap(tmp_path):
    lengths = np.full(4, 2**30, np.int32)
    write_index(tmp_path / "x.idx", np.dtype("<u2"), lengths)
    (tmp_path / "x.bin").touch()
    assert Shard(tmp_path / "x").pointers.tolist() == [n * 2**31 for n in range(4)]


@given(documents=DOCUMENTS, size=st.integers(1, 60), data=st.data())
def test_stream_is_the_same_however_it_is_sharded(tmp_path_factory, documents, size, data):
    folder = tmp_path_factory.mktemp("data")
    stream = [token for document in documents for token in document]
    listed = write_shards(folder, "train", documents, shard_tokens=size)
    corpus = corpus_of(folder, listed)
    assert corpus.num_tokens == len(stream) and corpus.num_documents == len(documents)
    assert corpus.num_bytes == len(stream) - len(documents)
    ends = sorted(data.draw(st.lists(st.integers(0, len(stream)), min_size=2, max_size=2)))
    assert corpus.tokens(*ends).tolist() == stream[slice(*ends)]
    found = [corpus.tokens(*corpus.document(i)).tolist() for i in range(len(documents))]
    assert found == documents
    for start, stop in ((-1, 2), (3, 2), (0, len(stream) + 1)):
        with pytest.raises(IndexError):
            corpus.tokens(start, stop)


def test_error_leaves_no_file_of_the_shard_in_progress(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), ShardWriter(tmp_path, "x", "<u2") as writer:
        writer.write(np.array([1, 0]), np.array([2]), [1])
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failing", ["index", "tokens"])
def test_shard_without_its_index_is_not_left(tmp_path, monkeypatch, failing):
    """Also where a shard of that name was there: its index would describe other tokens."""
    corpus_of(tmp_path, write_shards(tmp_path, "train", [[1, 2, EOD]]))
    said = "No space left" if failing == "index" else "3 tokens, but documents of 2"
    with (
        pytest.raises((OSError, RuntimeError), match=said),
        ShardWriter(tmp_path, "train-00000", "<u2") as writer,
    ):
        writer.write(np.array([1, 0, 0]), np.array([2]), [1])
        if failing == "index":
            writer.write((), np.array([1]), [1])
            full = OSError(errno.ENOSPC, "No space left on device")
            monkeypatch.setattr(shards, "write_index", mock.Mock(side_effect=full))
    assert not list(tmp_path.glob("train-00000.*"))


def test_data_that_read_back_otherwise_are_not_published(tmp_path, monkeypatch):
    digest = type("Digest", (), {"digest": lambda self: b"another"})
    with (
        pytest.raises(UserError, match="reads back different"),
        ShardWriter(tmp_path, "x", "<u2") as writer,
    ):
        writer.write(np.array([1, 0]), np.array([2]), [1])
        monkeypatch.setattr("hashlib.file_digest", lambda *_: digest())
    assert not list(tmp_path.iterdir())


def test_missing_foreign_and_cut_files_are_named(tmp_path):
    corpus_of(tmp_path, write_shards(tmp_path, "train", [[1, 2, EOD]]))
    index, data = tmp_path / "train-00000.idx", tmp_path / "train-00000.bin"
    whole = index.read_bytes()
    for damaged, message in (
        (b"", "not an index"),
        (b"X" * len(whole), "not an index"),
        (whole[:-1], "its header asks for"),
        (whole[:17] + b"\x63" + whole[18:], "dtype code 99"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            open_corpus(tmp_path, "train")
    index.write_bytes(whole)
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train-00000\.bin: documents, tokens, dtype are"):
        open_corpus(tmp_path, "train")
    data.unlink()
    with pytest.raises(UserError, match=r"train-00000\.bin: no such file"):
        open_corpus(tmp_path, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "manifest.json: is not JSON"),
        ("[]", "not a manifest"),
        ('{"format_version": 1}', "has no fingerprint"),
        ('{"format_version": 99}', "format_version is 99"),
    ],
)
def test_unfinished_and_unknown_folders_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match="holds no finished data"):
        open_corpus(tmp_path, "train")
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        open_corpus(tmp_path, "train")
    with pytest.raises(UserError, match="no split 'test'; there are: train, validation"):
        open_corpus(write_prepared(tmp_path / "data", [[1, EOD]]), "test")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = write_prepared(tmp_path_factory.mktemp("prepared"), [[1, 2, EOD], [EOD], [7, EOD]])
    return folder, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@given(data=st.data())
def test_damaged_files_are_read_alike_or_refused_in_one_line(prepared, data):
    """Nothing but `UserError` is raised, and no token is read that is not there."""
    folder, files = prepared
    damage = data.draw(damages(files, ["*"], folder))
    damage.apply(folder)
    try:
        corpus = open_corpus(folder, "train")
        found = [corpus.tokens(*corpus.document(i)) for i in range(corpus.num_documents)]
        assert sum(map(len, found)) <= corpus.num_tokens
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    finally:
        damage.undo(folder, files[damage.name])


SHARDS, TOKENS, SPARSE = 1254, 500_000_000, 500_000
READ = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from cat_lm.data import TrainLoader, open_corpus
corpus = open_corpus(sys.argv[1], "train")
loader = TrainLoader(corpus, 2048, 256, seed=0)
middle = loader.samples_per_epoch // 256 // 2
for step in range(middle, middle + 10):
    loader.batch(step)
read = sum("_mapping" in shard.opened.__dict__ for shard in corpus.shards)
# Not ru_maxrss: a process begins with that of the one that started it.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(read, int(peak.split()[1]) / 1024)
"""


def test_627_billion_tokens_are_read_in_the_middle_with_little_memory(tmp_path):
    """Sparse files of the real size, more of them than 256 open files would do for."""
    header = HEADER.pack(MAGIC, VERSION, CODES[token_dtype(50_277)], SPARSE, SPARSE + 1)
    counts = {"documents": SPARSE, "tokens": TOKENS, "bytes": 1}
    listed = [{"name": f"train-{number:05d}", **counts} for number in range(SHARDS)]
    for entry in listed:
        with open(tmp_path / f"{entry['name']}.bin", "wb") as stream:
            stream.truncate(2 * TOKENS)
        with open(tmp_path / f"{entry['name']}.idx", "wb") as stream:
            stream.write(header)
            stream.truncate(index_bytes(SPARSE))
    (tmp_path / "manifest.json").write_text(json.dumps(bare_manifest(listed, 50_277)))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True
    )
    read, megabytes = map(float, done.stdout.split())
    assert read > 0.8 * SHARDS and megabytes < 200
