"""What can go wrong in a preparation: foreign folders, empty input, full disks, bad arguments."""

import collections
import errno

import pytest

from cat_lm.data import TokenCorpus
from cat_lm.errors import UserError
from data_prep import output, pipeline
from data_prep.documents import Document
from data_prep.encode import chunks
from data_prep.prepare import main
from tests.conftest import write_jsonl
from tests.unit.test_data_prepare import flags, texts_of


def test_folders_of_others_are_left_alone(tmp_path, prepare, many_documents):
    (tmp_path / "train-00000.bin").write_text("precious")
    for more in ((), ("--overwrite",)):
        with pytest.raises(UserError, match="is not empty"):
            prepare(tmp_path, *flags(many_documents, *more))
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.bin"]
    (tmp_path / "manifest.json").write_text('{"name": "a web application"}')
    with pytest.raises(UserError, match="not a manifest of prepared data"):
        prepare(tmp_path, *flags(many_documents, "--overwrite"))
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        prepare(tmp_path / "file", *flags(many_documents))


def test_two_preparations_into_one_folder_exclude_each_other(tmp_path, prepare, many_documents):
    with (
        output.locked(tmp_path / "out"),
        pytest.raises(UserError, match="another preparation is writing"),
    ):
        prepare(tmp_path / "out", *flags(many_documents))
    prepare(tmp_path / "out", *flags(many_documents, "--workers", 1))


def test_one_document_cannot_be_split(tmp_path, prepare):
    (tmp_path / "x.txt").write_text("one document\n\nor two\n\nor three\n\nor four")
    with pytest.raises(UserError, match=r"split comes out empty.*--document-separator"):
        prepare(tmp_path / "out", *flags(tmp_path / "x.txt", "--workers", 1))
    with pytest.raises(UserError, match="holds no finished data"):
        TokenCorpus.open(tmp_path / "out", "train")
    more = ("--document-separator", r"\n\n", "--workers", 1)
    for seed, fraction in ((0, 0.01), (1, 0.01), (2, 0.99), (3, 0.99)):
        chosen = ("--validation-fraction", fraction, "--seed", seed)
        out = prepare(tmp_path / f"out{seed}", *flags(tmp_path / "x.txt", *more, *chosen))
        counts = [len(list(texts_of(out, split))) for split in ("train", "validation")]
        assert sorted(counts) == [1, 3], "of few documents, at least one is held out and one kept"
        assert (counts[0] > counts[1]) == (fraction < 0.5)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_empty_input(tmp_path, prepare, texts):
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    with pytest.raises(UserError, match="empty input, no document with any text"):
        prepare(tmp_path / "out", *flags(path, "--workers", 1))


def test_a_disk_that_would_not_do_is_refused_beforehand(
    tmp_path, prepare, many_documents, monkeypatch
):
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: usage(100_000))
    with pytest.raises(UserError, match=r"about 0\.00\d GB are needed and 0\.000 GB are free"):
        prepare(tmp_path / "out", *flags(many_documents, "--workers", 1))
    assert not list((tmp_path / "out").glob("*.bin"))
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: usage(10**9))
    prepare(tmp_path / "out", *flags(many_documents, "--workers", 1))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_leaves_nothing_that_looks_whole(
    tmp_path, prepare, many_documents, monkeypatch, workers
):
    written = []

    def append(self, tokens, lengths):
        from cat_lm.data.shards import _disk_errors

        written.append(len(tokens))
        if len(written) > 3:
            with _disk_errors(self._path(".bin")):
                raise OSError(errno.ENOSPC, "No space left on device")
        real(self, tokens, lengths)

    real = pipeline.ShardWriter._append
    monkeypatch.setattr(pipeline.ShardWriter, "_append", append)
    with pytest.raises(UserError, match="the disk is full"):
        prepare(
            tmp_path / "out", *flags(many_documents, "--workers", workers, "--shard-tokens", 9000)
        )
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(UserError, match="holds no finished data"):
        TokenCorpus.open(tmp_path / "out", "train")
    monkeypatch.undo()
    prepare(tmp_path / "out", *flags(many_documents, "--workers", 1))


def test_a_document_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("data_prep.encode.MAX_DOCUMENT", 10)
    with pytest.raises(UserError, match=r"too large to encode.*--document-separator"):
        list(chunks([Document("x" * 11, "txt")]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation-fraction", 0), "--validation-fraction 0.0: must lie between 0 and 1"),
        (("--workers", 0), "--workers 0: must be at least 1"),
        (("--max-bytes", -1), "--max-bytes -1: must be at least 1"),
        (("--document-separator", ""), "--document-separator ''"),
        (("--tokenizer", "absent.model"), "--tokenizer absent.model: no such file"),
        (("--path", "/absent"), "--path /absent: no such file or folder"),
        (("--text-key", "body"), "x.jsonl:1: no text under the key 'body'"),
        (("--out", "/proc/nowhere"), "--out /proc/nowhere: cannot be written"),
        (("--scratch", "/proc/nowhere"), "--scratch /proc/nowhere: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path, many_documents, monkeypatch, capsys, arguments, message
):
    given = [*flags(many_documents), "--out", tmp_path / "out", "--workers", 1, *arguments]
    monkeypatch.setattr("sys.argv", ["prepare", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    complaint = capsys.readouterr().err.splitlines()
    assert len(complaint) == 1
    assert complaint[0].startswith("error: ") and message in complaint[0]
    assert not (tmp_path / "out" / "manifest.json").exists()
