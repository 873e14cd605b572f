"""What can go wrong in a preparation: foreign folders, empty input, full disks, bad arguments."""

import collections
import errno
import subprocess
import sys

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data import shards
from cat_lm.data.opening import open_corpus
from cat_lm.data.packing import PackedWindows
from data_prep.assemble.output_folder import OutputFolder
from data_prep.encode import encoding, estimate, parts
from data_prep.prepare import main
from tests.conftest import REPOSITORY, many_texts, write_jsonl
from tests.prepared_data import digests
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


def test_two_preparations_into_one_folder_exclude_each_other(tmp_path, prepare, some_documents):
    with (
        OutputFolder(tmp_path / "out", None).locked(),
        pytest.raises(UserError, match="another preparation is writing"),
    ):
        prepare(tmp_path / "out", *flags(some_documents))
    prepare(tmp_path / "out", *flags(some_documents, "--workers", 1))


def test_of_few_documents_at_least_one_is_held_out_and_one_kept(tmp_path, prepare):
    (tmp_path / "x.txt").write_text("one document\n\nor two\n\nor three\n\nor four")
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
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: usage(100_000))
    with pytest.raises(UserError, match=r"about 0\.00\d GB are needed and 0\.000 GB are free"):
        prepare(tmp_path / "out", *flags(many_documents, "--workers", 1))
    assert not list((tmp_path / "out").glob("*.bin"))
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: usage(10**9))
    prepare(tmp_path / "out", *flags(many_documents, "--workers", 1))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (("--tokens", "999999B"), "the input has about .* training tokens"),
        (("--text-key", "body"), "no text under the key 'body'"),
        (("--eod-token", "<nowhere>"), "--eod-token"),
        (("--sets", "nowhere"), "--sets nowhere: no such set; there are jsonl"),
    ],
)
def test_a_mistake_beside_overwrite_leaves_finished_data(tmp_path, prepare, mistake, message):
    given = flags(write_jsonl(tmp_path / "x.jsonl", many_texts(300)), "--workers", 1)
    out = prepare(tmp_path / "out", *given)
    before = digests(out)
    with pytest.raises(UserError, match=message):
        prepare(out, *given, "--overwrite", *mistake)
    assert digests(out).items() >= before.items()


def test_where_the_source_lies_decides_nothing(tmp_path, prepare, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "x.jsonl", many_texts(300))
    out = prepare(tmp_path / "out", *flags(tmp_path / "a", "--workers", 1))
    for path in (f"{tmp_path}/a/", tmp_path / "b"):
        prepare(out, *flags(path, "--workers", 1))
        assert "already complete" in capsys.readouterr().out
    write_jsonl(tmp_path / "b" / "x.jsonl", many_texts(300)[1:])
    with pytest.raises(UserError, match=r"source was .*file_bytes") as raised:
        prepare(out, *flags(tmp_path / "b", "--workers", 1))
    assert '"kind"' not in str(raised.value)


def test_packing_plans_go_with_the_data_they_are_of(tmp_path, prepare):
    given = flags(write_jsonl(tmp_path / "x.jsonl", many_texts(300)), "--workers", 1)
    out = prepare(tmp_path / "out", *given)
    PackedWindows(open_corpus(out, "train"), 64)
    before = digests(out)
    with pytest.raises(UserError, match="the validation split comes out empty"):
        prepare(out, *given, "--overwrite", "--max-documents", 1)
    assert digests(out) == before
    prepare(out, *given, "--overwrite", "--seed", 1)
    assert not (out / "packing").exists()


@pytest.mark.parametrize("calls", [1, 2, 7])
def test_a_disk_that_fills_up_stops_cleanly_and_the_same_command_continues(
    tmp_path, prepare, some_documents, monkeypatch, calls
):
    """Full while a part (its first write, a later one) and while a shard is written."""
    arguments = flags(some_documents, "--workers", 1, "--shard-tokens", 17_000)
    expected = digests(prepare(tmp_path / "whole", *arguments))
    written = []

    def full(real):
        def write(*given):
            written.append(given)
            if len(written) == calls:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*given)

        return write

    monkeypatch.setattr(encoding, "CHUNK_BYTES", 35_000)
    monkeypatch.setattr("data_prep.encode.parts._write", full(parts._write))
    monkeypatch.setattr(shards.ShardWriter, "_append", full(shards.ShardWriter._append))
    with pytest.raises(UserError, match=r"the disk is full \(\d+ MiB free\); make room and run"):
        prepare(tmp_path / "out", *arguments)
    assert len(written) == calls
    assert not list((tmp_path / "out").rglob("*.tmp"))
    with pytest.raises(UserError, match="holds no finished data"):
        open_corpus(tmp_path / "out", "train")
    prepare(tmp_path / "out", *arguments)
    assert digests(tmp_path / "out") == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_may_not_grow_are_one_line_and_exit_code_2(tmp_path, many_documents, workers):
    """A real limit of the system, in the process itself and in its workers."""
    arguments = [*map(str, flags(many_documents, "--workers", workers, "--out", tmp_path / "out"))]
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        "from data_prep.prepare import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "files may not grow further here (ulimit -f)" in complaint
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_document_that_is_too_large_is_malformed(tmp_path, prepare, monkeypatch):
    path = write_jsonl(tmp_path / "x.jsonl", [*(f"text {n}" for n in range(40)), "x" * 1001])
    monkeypatch.setattr("data_prep.sources.documents.MAX_DOCUMENT", 1000)
    with pytest.raises(
        UserError,
        match=r"1 of 41 records are malformed, more than --max-malformed 0.01%.*--document-sep",
    ):
        prepare(tmp_path / "out", *flags(path, "--workers", 1))
    prepare(tmp_path / "out", *flags(path, "--workers", 1, "--max-malformed", 1))
    assert "too large to encode" in (tmp_path / "out" / "malformed.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation-fraction", 0), "--validation-fraction: '0' must be greater than 0"),
        (("--workers", 0), "--workers: '0' must be from 1 to 4,096"),
        (("--workers", 10**6), "--workers: '1000000' must be from 1 to 4,096"),
        (("--seed", 10**64), "--seed: '1000000"),
        (("--seed", "abc"), "--seed: 'abc' must be a whole number"),
        (("--seed", "9" * 5000), "9999...' must be a whole number"),
        (("--set-key", ""), "--set-key: '' must be a key"),
        (("--validation-path", ""), "--validation-path: '' is no path"),
        (("--path", ""), "--path: '' is no path"),
        (("--path", "another"), "--path: is given twice"),
        (("--exclude-sets", "A", "--exclude-sets", "B"), "--exclude-sets: is given twice"),
        (("--mixture", "A=1", "--mixture", "B=1"), "--mixture: is given twice"),
        (("--eod-token", ""), "--eod-token: '' is no path, name or value"),
        (("--set-key", "meta..x"), "--set-key: 'meta..x' must be a key"),
        (("--max-bytes", -1), "--max-bytes: '-1' must be from 1 to 1,000,000"),
        (("--tokens", "15X"), "--tokens: '15X' must be a whole number such as 20000, 0.5M or 15B"),
        (("--tokens", "0"), "--tokens: '0' must be from 1 to"),
        (("--mixture", "A=1,B"), "--mixture: 'A=1,B' must be SET=NUMBER"),
        (("--mixture", "A=1,A=2"), "which 'A=2' is not"),
        (("--repeat", "A=0"), "SET=NUMBER with a positive number"),
        (("--repeat", "A=2", "--tokens", "1M"), "--repeat does not go with --tokens"),
        (("--tokens", "1M", "--max-documents", 9), "--tokens does not go with --max-documents"),
        (("--mixture", "A=1", "--exclude-sets", "A"), "A: the set is left out by the other"),
        (("--sets", ","), "--sets: ',' must be names or patterns, with commas"),
        (("--exclude", ","), "--exclude: ',' must be names or patterns, with commas"),
        (("--exclude", "*.md"), "--exclude *.md: matches no file; they have names such as x.jsonl"),
        (("--exclude", "*"), "--exclude *: leaves no file"),
        (
            ("--source", "slimpajama", "--exclude", "*.zst"),
            "--exclude: only with --source python-stdlib or files",
        ),
        (
            ("--source", "raw-bytes", "--exclude", "x"),
            "--exclude: says nothing with --source raw-bytes; leave it out",
        ),
        (("--max-malformed", "some"), "--max-malformed: 'some' must be a number of lines"),
        (("--task", "0/2"), "--task goes with --stage encode"),
        (("--task", "2/2", "--stage", "encode"), "--task: '2/2' must be I/N, with I from 0"),
        (("--tokens", "2M"), "--tokens 2000000: the training split has 618,568 tokens"),
        (("--tokens", "1e99"), "--tokens: '1e99' must be from 1 to 1,000,000"),
        (("--tokens", "9" * 5000), "9...' must be a whole number"),
        (("--repeat", "A=9999999"), "--repeat A=9999999: must be at most 1,000,000 times"),
        (("--mixture", "A=" + "9" * 5000), "must be SET=NUMBER with a positive number"),
        (("--task", "1/" + "9" * 5000, "--stage", "encode"), "must be I/N, with I from 0"),
        (("--tokenizer",), "expected one argument"),
        (("--nothing",), "unrecognized arguments: --nothing"),
        (("--sets", "nowhere"), "--sets nowhere: no such set; there are jsonl"),
        (("--document-separator", ""), "--document-separator: ''"),
        (("--tokenizer", "absent.model"), "--tokenizer absent.model: no such file"),
        (("--validation-path", "/absent"), "--validation-path /absent: no such file or folder"),
        (("--text-key", "body"), "x.jsonl:1: no text under the key 'body'"),
        (("--out", "/proc/nowhere"), "--out /proc/nowhere: /proc may not be written to"),
        (("--scratch", "/proc/nowhere"), "--scratch /proc/nowhere: /proc may not be written to"),
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
