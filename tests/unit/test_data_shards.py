"""Shards and the corpus: the format on disk, shard boundaries, damage, and size without weight."""

import errno
import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import Shard, ShardWriter, index_bytes, token_dtype
from tests.prepared_data import bare_manifest

EOD = 0


def write(folder, documents, dtype="<u2", shard_tokens=10**9, scratch=None):
    with ShardWriter(folder, "train", np.dtype(dtype), shard_tokens, scratch) as writer:
        for document in documents:
            writer.write(np.array(document), np.array([len(document)]), [len(document) - 1])
    return writer.shards


def corpus_of(folder, shards, dtype="uint16"):
    """A corpus as `prepare` would leave it, as far as reading it goes."""
    listed = [shard.to_json() for shard in shards]
    (folder / "manifest.json").write_text(json.dumps(bare_manifest(listed, 100, dtype)))
    return open_corpus(folder, "train")


def test_the_files_follow_the_public_description_byte_for_byte(tmp_path):
    write(tmp_path, [[5, 6, EOD], [EOD], [7, EOD]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8) + struct.pack("<QQ", 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8)
    expected += struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "train-00000.idx").read_bytes() == expected
    assert len(expected) == index_bytes(3)
    assert (tmp_path / "train-00000.bin").read_bytes() == struct.pack("<6H", 5, 6, 0, 0, 7, 0)


def test_large_vocabularies_are_stored_as_int32_which_megatron_has_a_code_for(tmp_path):
    assert token_dtype(65_535) == np.dtype("<u2")
    assert token_dtype(65_536) == np.dtype("<i4")
    write(tmp_path, [[70_000, EOD]], "<i4")
    assert (tmp_path / "train-00000.idx").read_bytes()[17] == 4
    assert Shard(tmp_path / "train-00000").tokens.tolist() == [70_000, 0]


def test_megatrons_own_layout_of_several_sequences_in_a_document_is_read(tmp_path):
    tokens = np.array([1, 2, 3, 4, 5, 6], dtype="<i4")
    (tmp_path / "x.bin").write_bytes(tokens.tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 3)
    index += (
        struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 4, 12) + struct.pack("<3q", 0, 2, 3)
    )
    (tmp_path / "x.idx").write_bytes(index)
    shard = Shard(tmp_path / "x")
    assert (shard.num_sequences, shard.num_documents, shard.num_tokens) == (3, 2, 6)
    starts, stops = shard.documents(0, 2)
    assert (starts.tolist(), stops.tolist()) == ([0, 3], [3, 6])


@pytest.mark.parametrize("shard_tokens", [1, 3, 5, 7, 100])
@pytest.mark.parametrize("together", [False, True])
def test_documents_and_stream_are_the_same_however_they_are_sharded(
    tmp_path, shard_tokens, together
):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, 99, rng.integers(0, 9)).tolist(), EOD] for _ in range(40)]
    stream = [token for document in documents for token in document]
    if together:
        with ShardWriter(tmp_path, "train", np.dtype("<u2"), shard_tokens) as writer:
            lengths = np.array([len(document) for document in documents])
            writer.write(np.array(stream), lengths, lengths - 1)
        shards = writer.shards
    else:
        shards = write(tmp_path, documents, shard_tokens=shard_tokens)
    corpus = corpus_of(tmp_path, shards)
    assert corpus.num_tokens == len(stream)
    assert corpus.num_documents == 40
    assert corpus.num_bytes == len(stream) - 40
    assert all(s.tokens <= shard_tokens or s.documents == 1 for s in shards)
    for start in range(0, len(stream), 3):
        for stop in (start, start + 1, start + 11, len(stream)):
            stop = min(stop, len(stream))
            found = corpus.tokens(start, stop)
            assert found.dtype == np.int64
            assert found.tolist() == stream[start:stop]
    for index, document in enumerate(documents):
        assert corpus.tokens(*corpus.document(index)).tolist() == document
    for start, stop in ((-1, 2), (3, 2), (0, len(stream) + 1)):
        with pytest.raises(IndexError):
            corpus.tokens(start, stop)


def test_an_error_leaves_no_file_of_the_shard_in_progress(tmp_path):
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"), 4)
    with pytest.raises(RuntimeError, match="stop"), writer:
        writer.write(np.array([1, 0, 2, 0, 3, 0]), np.array([2, 2, 2]), [1, 1, 1])
        raise RuntimeError("stop")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train-00000.bin", "train-00000.idx"]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(OSError, match="No space left"),
        ShardWriter(tmp_path, "train", np.dtype("<u2")) as writer,
    ):
        writer._open()
        writer._stream.close()
        writer._stream = Full()
        writer.write(np.array([1, 0]), np.array([2]), [1])
    assert not list(tmp_path.iterdir())


def test_data_that_read_back_otherwise_are_not_published(tmp_path):
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"))
    with pytest.raises(UserError, match="reads back different"), writer:
        writer.write(np.array([1, 0]), np.array([2]), [1])
        writer._stream.flush()
        with open(writer._path(".bin"), "rb+") as stream:
            stream.write(b"\xff")
    assert not list(tmp_path.glob("train-*"))


def test_missing_foreign_and_cut_files_are_named(tmp_path):
    shards = write(tmp_path, [[1, 2, EOD]])
    corpus_of(tmp_path, shards)
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
    with pytest.raises(UserError, match="the manifest says"):
        open_corpus(tmp_path, "train")
    data.unlink()
    with pytest.raises(UserError, match=r"train-00000\.bin: no such file"):
        open_corpus(tmp_path, "train")


def test_unfinished_and_unknown_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        open_corpus(tmp_path / "absent", "train")
    with pytest.raises(UserError, match="holds no finished data"):
        open_corpus(tmp_path, "train")
    for text, message in (
        ("{", "manifest.json: is not JSON"),
        ("[]", "not a manifest"),
        ("{}", "has no format_version"),
        ('{"format_version": 1}', "has no fingerprint"),
        ('{"format_version": 99}', "format_version is 99"),
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=message):
            open_corpus(tmp_path, "train")
    write(tmp_path, [[1, EOD]])
    corpus_of(tmp_path, [])
    with pytest.raises(UserError, match="no split 'test'; there are: train, validation"):
        open_corpus(tmp_path, "test")


OPEN_AND_READ = """
import resource, sys, time
import numpy
from cat_lm.data import TrainLoader, open_corpus
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
corpus = open_corpus(sys.argv[1], "train")
loader = TrainLoader(corpus, 2048, 256, seed=0)
batch = loader.batch(20_000)
corpus.document(corpus.num_documents - 1)
seconds = time.perf_counter() - start
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
assert corpus.num_tokens == 15_000_000_000 and batch["input_ids"].shape == (256, 2048)
print(seconds, grown)
"""


def test_15_billion_tokens_open_and_serve_step_20000_at_once(tmp_path):
    """Sparse files of the real size: 30 shards of 500M tokens, 15M documents."""
    documents, tokens = 500_000, 500_000_000
    listed = []
    for number in range(30):
        name = f"train-{number:05d}"
        with open(tmp_path / f"{name}.bin", "wb") as stream:
            stream.truncate(2 * tokens)
        with open(tmp_path / f"{name}.idx", "wb") as stream:
            header = (b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1)
            stream.write(struct.pack("<9sQBQQ", *header))
            stream.seek(index_bytes(documents) - 16)
            stream.write(struct.pack("<2q", documents - 1, documents))  # the last one's marks
        listed.append((name, documents, tokens))

    class Listed:
        def __init__(self, name, documents, tokens):
            self.values = dict(name=name, documents=documents, tokens=tokens, bytes=1)

        def to_json(self):
            return self.values

    corpus_of(tmp_path, [Listed(*values) for values in listed])
    done = subprocess.run(
        [sys.executable, "-c", OPEN_AND_READ, tmp_path], capture_output=True, text=True, check=True
    )
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 2
    assert megabytes < 200
