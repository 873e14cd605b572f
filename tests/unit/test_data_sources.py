"""Sources: which documents come out of which files, in which order; and what cannot be read."""

import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import sysconfig
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.errors import TemporaryError, UserError
from data_prep import raw_bytes
from data_prep.sources import Part, open_source, sample_texts
from data_prep.sources import documents as documents_module
from data_prep.sources.base import in_natural_order
from data_prep.sources.documents import Document, Malformed, Reading
from data_prep.sources.local import PythonStdlib

TEXTS = ["one", "zwei\nZeilen", "drei \U0001f600", ""]


def documents(source):
    return [document for part in source.parts for document in source.read(part)]


def texts(kind, path, reading=None, **options):
    source = open_source(kind, str(path), reading or Reading(), **options)
    return [document.text for document in documents(source)]


def json_lines(values=TEXTS, key="text", **extra):
    return "".join(json.dumps({key: value, **extra}) + "\n" for value in values).encode()


def write_all_kinds(folder):
    """One file of each kind with the same four documents, and some that are none of ours."""
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(json_lines() + b"\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines()))
    frames = [zstandard.compress(part) for part in (json_lines()[:25], json_lines()[25:])]
    (folder / "sub" / "c.jsonl.zst").write_bytes(b"".join(frames))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "x": range(4)}), folder / "d.parquet")
    (folder / "e.txt").write_text("plain", encoding="utf-8")
    (folder / "f.md").write_bytes(b"\xef\xbb\xbf# marked\r\n")
    (folder / "g.csv").write_text("no,text")
    (folder / ".hidden.txt").write_text("no")


def test_files_of_every_kind_in_a_folder(tmp_path):
    write_all_kinds(tmp_path)
    expected = [*TEXTS * 2, *TEXTS, "plain", "# marked\r\n", *TEXTS]
    assert texts("files", tmp_path) == expected
    source = open_source("files", str(tmp_path), Reading())
    assert [part.name for part in source.parts][-1] == "sub/c.jsonl.zst"
    assert {document.set for document in documents(source)} == {
        *("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "md")
    }


def test_one_file_and_globs(tmp_path):
    write_all_kinds(tmp_path)
    assert texts("files", tmp_path / "e.txt") == ["plain"]
    assert texts("files", tmp_path / "**" / "*.zst") == TEXTS
    assert texts("files", f"{tmp_path}/[ef].*") == ["plain", "# marked\r\n"]
    source = open_source("files", f"{tmp_path}/s*/*.zst", Reading())
    assert [part.name for part in source.parts] == ["sub/c.jsonl.zst"]  # no machine's path


def test_separators_keys_and_own_validation_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\nthree")
    assert texts("files", tmp_path / "a.txt", Reading(separator="\n\n")) == [
        "one",
        "two",
        "",
        "three",
    ]
    (tmp_path / "b.jsonl").write_bytes(json_lines(["x"], key="content"))
    assert texts("files", tmp_path / "b.jsonl", Reading("content")) == ["x"]
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.txt").write_text("held out")
    source = open_source(
        *("files", str(tmp_path / "a.txt"), Reading()), validation_path=str(tmp_path / "held")
    )
    assert [document.split for document in documents(source)] == ["train", "validation"]
    assert [part.name for part in source.parts] == ["train/a.txt", "validation/a.txt"]


def test_zstd_frames_larger_than_a_block(tmp_path):
    lines = json_lines([f"{number} " * 1000 for number in range(3000)])
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(lines))
    assert texts("files", tmp_path) == [f"{number} " * 1000 for number in range(3000)]


BAD_LINES = {
    "y.jsonl": (json_lines(["ok"]) + b"{broken\n", r"y\.jsonl:2", "not a JSON line"),
    "u.jsonl": (b'{"text": "\xff"}\n', r"u\.jsonl:1", r"not UTF-8 \(byte 0xff at 10\)"),
    "l.jsonl": (b"\n[1]\n", r"l\.jsonl:2", "a JSON object is needed, not list"),
    "k.jsonl": (json_lines(["x"], key="body"), r"k\.jsonl:1", "no text under the key 'text'.*body"),
    "n.jsonl": (b'{"text": null}', r"n\.jsonl:1", "no text under the key 'text' but null$"),
    "f.jsonl": (b'{"text": 1.5}', r"f\.jsonl:1", "no text under the key 'text' but float$"),
    "s.jsonl": (b'{"text": "a\\ud800"}\n', r"s\.jsonl:1", "half a surrogate pair at 1"),
    "d.jsonl": (b"[" * 100_000 + b"\n", r"d\.jsonl:1", "not a JSON line"),
    "i.jsonl": (b'{"text": ' + b"1" * 9999 + b"}\n", r"i\.jsonl:1", "not a JSON line"),
    "m.jsonl": (b'{"a\\nb": 1}\n', r"m\.jsonl:1", "no text.* its keys are a b .choose"),
    "0.jsonl": (b"\0\0\0\n", r"0\.jsonl:1", "not a JSON line"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_in_its_place_and_the_others_are_read(tmp_path, name):
    content, where, reason = BAD_LINES[name]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_bytes(content.rstrip(b"\n") + b"\n" + json_lines(["after"]))
    found = documents(open_source("files", str(tmp_path), Reading()))
    bad = [item for item in found if isinstance(item, Malformed)]
    assert len(bad) == 1
    assert re.fullmatch(f"sub/{where}", bad[0].where)  # the name within the source: no machine's
    assert re.match(reason, bad[0].reason)
    assert "\n" not in bad[0].reason
    assert found[-2:] == [bad[0], Document("after", "jsonl")]


def test_lines_too_long_for_memory_are_skipped_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_LINE", 2 << 20)
    monkeypatch.setattr(documents_module, "BLOCK", 1 << 18)
    long, fits = b"x" * (32 << 20), json_lines(["y" * (1 << 20)])
    (tmp_path / "a.jsonl").write_bytes(long + b"\n" + fits + long + b"\n" + fits + long)
    tracemalloc.start()
    found = documents(open_source("files", str(tmp_path), Reading()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert [getattr(item, "where", None) for item in found] == [
        *("a.jsonl:1", None, "a.jsonl:3", None, "a.jsonl:5")
    ]
    assert found[1] == found[3] == Document("y" * (1 << 20), "jsonl")
    assert found[0].reason == "a line of more than 2 MiB"


def test_a_text_larger_than_memory_is_read_document_by_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "BLOCK", 1 << 16)
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", 1 << 20)
    paragraph, long = "wörter " * 1000, "ab" * (1 << 20)
    parts = [*[paragraph] * 1500, long, "kept", long]
    (tmp_path / "a.txt").write_text("\n\n".join(parts), encoding="utf-8")
    (tmp_path / "b.md").write_text(long * 4, encoding="utf-8")
    tracemalloc.start()
    source = open_source("files", str(tmp_path), Reading(separator="\n\n"))
    items = (item for part in source.parts for item in source.read(part))
    found = [item if isinstance(item, Malformed) else hash(item.text) for item in items]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
    said = "a document of more than 1 million characters (it begins 'abab"
    assert found[:1500] == [hash(paragraph)] * 1500 and found[1501] == hash("kept")
    refused = [found[1500], *found[1502:]]
    assert [item.where for item in refused] == ["a.txt", "a.txt", "b.md"]
    assert all(item.reason.startswith(said) for item in refused)


def test_a_text_that_is_too_large_is_not_read_to_its_end(monkeypatch):
    """Without a separator nothing behind its beginning can be encoded; it may be very long."""
    monkeypatch.setattr(documents_module, "BLOCK", 10)
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", 100)
    text = b"ab\n" * 1000
    for separator, read in ((None, 110), ("\n\n", len(text))):
        stream = io.BytesIO(text)
        (found,) = documents_module.read_records(stream, "x.txt", "x", Reading(separator=separator))
        assert isinstance(found, Malformed) and stream.tell() == read


@pytest.mark.parametrize("block", [3, 4, 5, 7])
def test_texts_are_cut_alike_wherever_blocks_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents_module, "BLOCK", block)
    for text in ("", "\n", "äa\n\n\nb", "\n\n\n\n", "\ufeffaab\n\n🙂\ufeff\n", "\r\n\n a\n\n"):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        for separator in ("\n\n", "\n", "🙂", "aab", None):
            whole = text.removeprefix("\ufeff")
            expected = [whole] if separator is None else whole.split(separator)
            assert texts("files", tmp_path, Reading(separator=separator)) == expected
    for text, place in ((b"ab\xffcd", 2), ("ö".encode() * 5 + b"\xc3", 10)):
        (tmp_path / "a.txt").write_bytes(text)
        with pytest.raises(UserError, match=rf"not UTF-8 \(byte 0x.. at {place}\); convert"):
            texts("files", tmp_path)


def text_column(values):
    """A string column of raw bytes, which may not be UTF-8; None for null."""
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


def test_bad_parquet_rows_are_named_and_the_others_are_read(tmp_path):
    table = pyarrow.table({"text": text_column([b"ok", None, b"\xff\xfe", "é".encode(), b""])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = documents(open_source("files", str(tmp_path), Reading()))
    assert [item.text for item in found if isinstance(item, Document)] == ["ok", "é", ""]
    bad = [item for item in found if isinstance(item, Malformed)]
    assert [item.where for item in bad] == ["a.parquet: row 2", "a.parquet: row 3"]
    assert bad[0].reason.startswith("no text under the key 'text'")
    assert bad[1].reason == "not UTF-8 (byte 0xff at 0)"


def test_a_parquet_file_of_one_large_group_of_rows_is_not_read_at_once(monkeypatch):
    monkeypatch.setattr(documents_module, "BLOCK", 1 << 14)
    asked = []

    class File(io.BytesIO):
        def read(self, size=-1):
            asked.append(size)
            return super().read(size)

    written = [hashlib.shake_256(bytes([number])).hexdigest(10_000) for number in range(200)]
    stream = File()
    table = pyarrow.table({"text": written})
    options = {"use_dictionary": False, "write_batch_size": 1, "data_page_size": 1 << 12}
    pyarrow.parquet.write_table(table, stream, row_group_size=10**6, **options)
    assert len(stream.getvalue()) > 2 << 20
    records = documents_module.read_records(stream, "x.parquet", "x", Reading())
    assert [text for text, _ in records] == written
    assert 0 < max(asked) <= 1 << 16 and min(asked) >= 0


def test_parquet_times_that_python_does_not_have_are_named(tmp_path):
    times = pyarrow.array([0, 2**40, 1], pyarrow.timestamp("s"))
    table = pyarrow.table({"text": ["a", "b", "c"], "meta": times})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, bad, last = documents(open_source("files", str(tmp_path), Reading()))
    assert (first.text, last.text) == ("a", "c")
    assert bad.where == "a.parquet: row 2" and bad.reason.startswith("not readable (")


BAD_FILES = {
    "x.txt": (b"ab\xffcd", r"x\.txt: not UTF-8 \(byte 0xff at 2\)"),
    "g.jsonl.gz": (gzip.compress(json_lines())[:-9], "g.jsonl.gz: broken gzip file"),
    "h.jsonl.gz": (b"not gzip", "h.jsonl.gz: broken gzip file"),
    "z.jsonl.zst": (zstandard.compress(json_lines())[:-3], "broken zstd file .cut short"),
    "w.jsonl.zst": (b"not zstd at all", r"w\.jsonl\.zst: broken zstd file"),
    "p.parquet": (b"PAR1 broken", r"p\.parquet: broken parquet file"),
    # What a download or a copy leaves that was cut short at once.
    "g0.jsonl.gz": (b"", r"g0\.jsonl\.gz: broken gzip file \(it is empty\)"),
    "z0.jsonl.zst": (b"", r"z0\.jsonl\.zst: broken zstd file \(it is empty\)"),
    "p0.parquet": (b"", r"p0\.parquet: broken parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_read_are_named_with_their_path(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        texts("files", tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/")


def test_a_parquet_file_damaged_in_a_page_is_named(tmp_path):
    table = pyarrow.table({"text": [f"{number} text" * 20 for number in range(5000)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[100:5000] = bytes(4900)
    (tmp_path / "x.parquet").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"x\.parquet: (broken parquet file|cannot be read)"):
        texts("files", tmp_path)


def test_a_damaged_page_is_named_where_no_file_is_open_here(tmp_path):
    """From the Hub the library's error came through, an `OSError` of no file, as a traceback."""
    stream = io.BytesIO()
    table = pyarrow.table({"text": [f"{number} text" * 20 for number in range(5000)]})
    pyarrow.parquet.write_table(table, stream, compression="zstd")
    stream.getbuffer()[100:5000] = bytes(4900)
    with pytest.raises(UserError, match=r"^hf://x\.parquet: broken parquet file \("):
        list(documents_module.read_records(stream, "hf://x.parquet", "x", Reading()))


def test_zstd_windows_beyond_the_librarys_default_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(json_lines()) + compressor.flush()
    (tmp_path / "x.jsonl.zst").write_bytes(data)
    assert texts("files", tmp_path) == TEXTS


def test_a_zstd_file_damaged_in_the_middle_is_named(tmp_path):
    lines = json_lines([str(number) * 50 for number in range(5000)])
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "x.jsonl.zst").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"x\.jsonl\.zst(:\d+)?: (broken|not)"):
        texts("files", tmp_path)


def test_parquet_without_the_column_names_the_ones_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'text'; its columns are body"):
        texts("files", tmp_path)
    assert texts("files", tmp_path, Reading("body")) == ["x"]


def test_paths_that_hold_nothing_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    for path, message in (
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path / "a.csv", "unknown kind of file; known are .txt"),
        (tmp_path, "no file of a known kind in it"),
    ):
        with pytest.raises(UserError, match=message):
            texts("files", path)
        with pytest.raises(UserError, match="--path"):
            texts("files", path)
    with pytest.raises(UserError, match="needs --path"):
        open_source("files", None, Reading())
    with pytest.raises(UserError, match="takes no --path"):
        open_source("python-stdlib", "x", Reading())


def names(source):
    return [part.name for part in source.parts]


def test_files_are_left_out_by_their_paths(tmp_path):
    for name in ("a.txt", "b.md", "sub/a.txt", "sub/deep/c.txt", "subs/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")

    def left(*exclude):
        return names(open_source("files", str(tmp_path), Reading(), exclude=exclude))

    whole = ["a.txt", "b.md", "sub/a.txt", "sub/deep/c.txt", "subs/d.txt"]
    assert left() == whole
    assert left("sub/*") == ["a.txt", "b.md", "subs/d.txt"], "* stands for / too"
    assert left("*.md", "sub?/*") == ["a.txt", "sub/a.txt", "sub/deep/c.txt"]
    assert left("[ab].*") == whole[2:], "a whole path must match"
    for pattern in ("sub", "SUB/*", "encodings/*", f"{tmp_path}/*", "x" * 999):
        with pytest.raises(UserError, match=r"^--exclude .*: matches no file; .* sub/a\.txt$"):
            left("a.txt", pattern)
    with pytest.raises(UserError, match=r"--exclude \*: leaves no file"):
        left("*")


def test_files_are_left_out_of_both_splits(tmp_path):
    for name in ("t/a.txt", "t/gen/b.txt", "v/c.txt", "v/gen/d.txt", "v/own.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def left(*exclude):
        options = {"validation_path": str(tmp_path / "v"), "exclude": exclude}
        return names(open_source("files", str(tmp_path / "t"), Reading(), **options))

    assert left("gen/*") == ["train/a.txt", "validation/c.txt", "validation/own.txt"]
    assert "validation/own.txt" not in left("own.txt"), "one of the two has it"
    with pytest.raises(UserError, match="leaves no file"):
        left("gen/*", "a.txt")


def test_of_several_files_one_is_left_and_divided(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a line of it\n" * 50)
    both = open_source("files", str(tmp_path), Reading(), validation_fraction=0.1)
    one = open_source(
        "files", str(tmp_path), Reading(), validation_fraction=0.1, exclude=("b.txt",)
    )
    assert names(both) == ["a.txt", "b.txt"]
    assert names(one) == ["train/a.txt", "validation/a.txt"]


def test_folders_behind_links_are_read_and_links_to_folders_above_end(tmp_path):
    there, root = tmp_path / "other disk", tmp_path / "mirror"
    for folder in (there / "deep", root / "chunk1"):
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_bytes(json_lines([folder.name]))
    (root / "chunk2").symlink_to(there)
    (root / "chunk1" / "up").symlink_to(root)
    (there / "deep" / "here").symlink_to(there / "deep")
    (root / "chunk1" / "b.jsonl").symlink_to(there / "deep" / "a.jsonl")
    source = open_source("files", str(root), Reading())
    names = [part.name for part in source.parts]
    assert names == ["chunk1/a.jsonl", "chunk1/b.jsonl", "chunk2/deep/a.jsonl"]
    assert texts("files", root) == ["chunk1", "deep", "deep"]
    (root / "chunk2").unlink()
    (root / "chunk1" / "c.jsonl").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match=r"--path .*c\.jsonl is a link to nothing"):
        texts("files", root)


def test_globs_follow_links_but_not_to_folders_above(tmp_path):
    there, root = tmp_path / "other disk", tmp_path / "mirror"
    for folder in (there, root / "chunk1"):
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_bytes(json_lines([folder.name]))
    (root / "chunk2").symlink_to(there)
    (root / "chunk1" / "up").symlink_to(root)
    (there / "here").symlink_to(there)
    source = open_source("files", f"{root}/**/*.jsonl", Reading())
    assert names(source) == ["chunk1/a.jsonl", "chunk2/a.jsonl"]
    # Who names the link means it.
    assert texts("files", f"{root}/*/up/chunk1/*.jsonl") == ["chunk1"]
    assert texts("files", f"{root}/**/chunk?/**/**") == ["chunk1", "other disk"]
    assert texts("files", f"{root}/chunk1/up/**/a.jsonl") == ["chunk1", "other disk"]


def test_links_that_lead_to_each_other_are_followed_once(tmp_path):
    """Neither folder lies above the other: each document was found some forty times."""
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(json_lines([name]))
        (tmp_path / name / "other").symlink_to(f"../{other}")
    expected = ["a/other/x.jsonl", "a/x.jsonl", "b/other/x.jsonl", "b/x.jsonl"]
    for path in (tmp_path, tmp_path / "**/*.jsonl"):
        assert sorted(names(open_source("files", str(path), Reading()))) == expected


def test_hidden_folders_are_not_looked_into(tmp_path, monkeypatch):
    """Nothing in them counts, and perhaps nobody may list them, as snapshots of a file system."""
    for name in (".snapshot", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(json_lines([name]))
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    for path in (tmp_path, tmp_path / "**/*.jsonl"):
        assert names(open_source("files", str(path), Reading())) == ["a/x.jsonl", "b/x.jsonl"]
    assert listed and not any(".snapshot" in str(path) for path in listed)


@pytest.mark.parametrize(("number", "kind"), [("ESTALE", TemporaryError), ("EACCES", UserError)])
@pytest.mark.parametrize(
    "call", ["data_prep.sources.documents.open", "data_prep.sources.base.sha256"]
)
def test_what_a_file_system_does_for_a_while_is_temporary(
    tmp_path, monkeypatch, call, number, kind
):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["x"]))
    source = open_source("files", str(tmp_path), Reading())

    def failing(*_):
        raise OSError(getattr(errno, number), "failed")

    monkeypatch.setattr(call, failing, raising=False)
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(") as error:
        source.describe() if call.endswith("sha256") else documents(source)
    assert type(error.value) is kind


def test_a_folder_that_cannot_be_listed_for_a_while_is_temporary(tmp_path, monkeypatch):
    def failing(path):
        raise OSError(errno.ESTALE, "failed", str(path))

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(TemporaryError, match=r": cannot be read \("):
        open_source("files", str(tmp_path), Reading())


def test_the_standard_library_and_raw_bytes_say_what_is_temporary(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.ESTALE, "failed")

    monkeypatch.setattr("data_prep.sources.local.open", failing, raising=False)
    with pytest.raises(TemporaryError, match=r"\.py: cannot be read \("):
        next(object.__new__(PythonStdlib).read(Part(tmp_path / "x.py", "x.py")))
    (tmp_path / "text8").write_bytes(b"text")
    monkeypatch.setattr(raw_bytes, "sha256", failing)
    with pytest.raises(TemporaryError, match=r"^--path .*text8: cannot be read \("):
        raw_bytes._describe(tmp_path / "text8", [4])


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    real = os.scandir

    def scandir(folder):  # the tests may run as root, whom no mode stops
        if str(folder).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"closed: cannot be read \(no permission\)"):
        texts("files", tmp_path)


def test_hidden_files_and_folders_are_left_out(tmp_path):
    for name in ("a.txt", ".b.txt", ".trash/c.txt", "sub/.ipynb_checkpoints/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts("files", tmp_path) == ["a.txt"]
    assert texts("files", tmp_path / ".trash") == [".trash/c.txt"]


def test_a_file_is_taken_once_and_for_one_split(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("x")
    assert texts("files", f"{tmp_path}/**/**/*.txt") == ["x"]
    (tmp_path / "b.txt").write_text("y")
    with pytest.raises(UserError, match=r"--validation-path .*: --path has .*sub/a.txt too"):
        texts("files", tmp_path, validation_path=f"{tmp_path}/sub")


def test_a_file_whose_name_is_not_utf8_is_refused(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as stream:
        stream.write("x")
    with pytest.raises(UserError, match=r"--path .*: the name '.*udcff\.txt' is not UTF-8"):
        texts("files", tmp_path)


def test_a_file_that_changes_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    source = open_source("files", str(tmp_path), Reading())
    (part,) = source.parts
    found = source.read(part)
    next(found)
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))  # written to, with as many bytes
    with pytest.raises(UserError, match=r"a\.jsonl: has changed since the preparation began"):
        list(found)
    assert len(list(source.read(part))) == len(TEXTS)
    with open(tmp_path / "a.jsonl", "ab") as stream:
        stream.write(json_lines(["late"]))
    with pytest.raises(UserError, match="has changed"):
        next(source.read(part))


def slimpajama(folder, validation=True):
    for split in ("train", "validation", "test"):
        if split == "validation" and not validation:
            continue
        for chunk in (1, 2, 10):
            path = folder / split / f"chunk{chunk}"
            path.mkdir(parents=True)
            lines = json_lines([f"{split} {chunk}"], meta={"redpajama_set_name": "RedPajamaC4"})
            lines += json_lines([f"{split} {chunk} unnamed"])
            (path / "example_0.jsonl.zst").write_bytes(zstandard.compress(lines))
    return folder


def test_slimpajama_mirror(tmp_path):
    source = open_source("slimpajama", str(slimpajama(tmp_path)), Reading())
    assert source.has_validation
    assert documents(source) == [
        Document(f"{split} {chunk}{suffix}", name, split)
        for split in ("train", "validation")
        for chunk in (1, 2, 10)  # as numbers, not as text
        for suffix, name in (("", "RedPajamaC4"), (" unnamed", "unknown"))
    ]
    sizes = [part.path.stat().st_size for part in source.parts]
    assert [part.size for part in source.parts] == sizes
    assert source.text_bytes() == sum(int(3.5 * size) for size in sizes)
    assert source.parts[2].name == "train/chunk10/example_0.jsonl.zst"


def test_a_source_can_be_sent_to_a_worker_and_read_again(tmp_path):
    source = open_source("slimpajama", str(slimpajama(tmp_path)), Reading())
    there = pickle.loads(pickle.dumps(source))
    assert there.parts == source.parts
    assert documents(there) == documents(source) == documents(source)


def test_natural_order_is_total_and_takes_digits_as_numbers():
    ordered = ["a", "a/b1", "a1.txt", "a01.txt", "a2", "a10", "a10b2", "a10b10", "b", "¹", "²"]
    for shuffled in (ordered[::-1], sorted(ordered), ordered):
        parts = in_natural_order(Part(name, name) for name in shuffled)
        names = [part.name for part in parts]
        assert names.index("a2") < names.index("a10") < names.index("a10b2")
        assert names.index("a10b2") < names.index("a10b10")
        assert names == [part.name for part in in_natural_order(Part(n, n) for n in ordered)]
    assert in_natural_order([]) == []


SET_NAMES = [
    ({"redpajama_set_name": "RedPajamaBook"}, "RedPajamaBook"),
    ('{"redpajama_set_name": "RedPajamaBook"}', "RedPajamaBook"),
    ("not JSON", "unknown"),
    ('["RedPajamaBook"]', "unknown"),
    ({"redpajama_set_name": 7}, "unknown"),
    ({"redpajama_set_name": ""}, "unknown"),
    ({"redpajama_set_name": "Another"}, "Another"),
    ({}, "unknown"),
    (None, "unknown"),
    ("[" * 100_000, "unknown"),
    ({"redpajama_set_name": "a\n\x1b[31mb"}, r"a\n\x1b[31mb"),
    ('{"redpajama_set_name": "\\ud800x"}', r"\ud800x"),
]


def test_set_names_of_json_lines_and_parquet(tmp_path):
    (tmp_path / "train").mkdir()
    lines = b"".join(json_lines(["x"], meta=meta) for meta, _ in SET_NAMES)
    (tmp_path / "train" / "a.jsonl").write_bytes(lines)
    as_json = [meta if isinstance(meta, str) else json.dumps(meta) for meta, _ in SET_NAMES]
    table = pyarrow.table({"text": ["x"] * len(as_json), "meta": as_json})
    pyarrow.parquet.write_table(table, tmp_path / "train" / "b.parquet")
    names = [{"redpajama_set_name": "RedPajamaC4"}, {"redpajama_set_name": None}, None]
    table = pyarrow.table({"text": ["x"] * 3, "meta": names})
    pyarrow.parquet.write_table(table, tmp_path / "train" / "c.parquet")
    found = documents(open_source("slimpajama", str(tmp_path), Reading()))
    expected = [name for _, name in SET_NAMES]
    assert [d.set for d in found] == [*expected * 2, "RedPajamaC4", "unknown", "unknown"]


def test_files_name_their_set_or_else_their_kind(tmp_path):
    lines = json_lines(["x"], meta={"pile_set_name": "ArXiv"}) + json_lines(["x"], kind="web")
    (tmp_path / "a.jsonl").write_bytes(lines)
    for key, sets in (
        ("meta.pile_set_name", ["ArXiv", "jsonl"]),
        ("kind", ["jsonl", "web"]),
        ("meta.redpajama_set_name", ["jsonl", "jsonl"]),
    ):
        source = open_source("files", str(tmp_path), Reading(set_key=key))
        assert [document.set for document in documents(source)] == sets


def test_slimpajama_without_validation_leaves_the_split_open(tmp_path):
    source = open_source("slimpajama", str(slimpajama(tmp_path, validation=False)), Reading())
    assert not source.has_validation
    assert {document.split for document in documents(source)} == {None}


def test_equal_input_has_an_equal_description_wherever_it_lies(tmp_path, monkeypatch):
    def describe(folder):
        source = open_source("files", str(tmp_path / folder), Reading())
        return {key: value for key, value in source.describe().items() if key != "path"}

    for folder, content in (("a", "one two"), ("b", "one two"), ("c", "two one")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(content)
        (tmp_path / folder / "y.txt").write_text("y")
    os.utime(tmp_path / "b" / "x.txt", (0, 0))
    assert describe("a") == describe("b")
    differing = {key for key in describe("a") if describe("a")[key] != describe("c")[key]}
    assert differing == {"contents_sha256"}
    monkeypatch.setattr("data_prep.sources.base.HASHED_BYTES", 7)  # as with terabytes: not read
    assert "contents_sha256" not in describe("a")
    assert describe("a") == describe("c")


def test_the_standard_library_has_no_tests_and_a_fixed_order():
    source = open_source("python-stdlib", None, Reading())
    names = [part.name for part in source.parts]
    assert names == sorted(names)
    assert {"abc.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "lib2to3"}
    source.parts = [part for part in source.parts if part.name == "abc.py"]
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert documents(source)[0].text == (stdlib / "abc.py").read_text(encoding="utf-8")


def test_the_standard_library_is_whole_unless_files_are_left_out():
    whole = names(open_source("python-stdlib", None, Reading()))
    tables = [name for name in whole if name.startswith("encodings/")]
    assert len(tables) > 50
    left = names(open_source("python-stdlib", None, Reading(), exclude=("encodings/*",)))
    assert left == [name for name in whole if name not in tables]
    with pytest.raises(UserError, match=r"--exclude encoding/\*: matches no file"):
        open_source("python-stdlib", None, Reading(), exclude=("encoding/*",))


def test_a_distributions_python_of_this_version_has_the_same_files(tmp_path, monkeypatch):
    """Debian's has no tests, spreads packages over several others, and adds files of its own."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    split_off = {"test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    for file in stdlib.rglob("*.py"):
        path = file.relative_to(stdlib)
        if path.parts[0] in split_off | {"site-packages"} or "macholib" in path.parts:
            continue
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "dist-packages").mkdir()
    for extra in ("sitecustomize.py", "_distutils_system_mod.py", "dist-packages/abc.py"):
        (tmp_path / extra).touch()
    expected = [part.name for part in open_source("python-stdlib", None, Reading()).parts]
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [part.name for part in open_source("python-stdlib", None, Reading()).parts] == expected


def test_an_interpreter_without_source_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no source files of the standard library"):
        open_source("python-stdlib", None, Reading())


def test_a_sample_is_training_text_of_many_files_and_bounded(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03d}.txt").write_text(f"{number:03d}:" + "x" * 996)
    source = open_source("files", str(tmp_path), Reading())

    def sample(seed, size, wanted=lambda document: True):
        return list(sample_texts(source, seed, size, wanted))

    chosen = sample(0, 20_000)
    assert chosen == sample(0, 20_000) != sample(1, 20_000)
    assert 20_000 <= sum(map(len, chosen)) <= 21_000
    assert len({text[:3] for text in chosen}) >= 20
    held_out = sample(0, 10**6, lambda document: document.text < "050")
    assert sorted(text[:3] for text in held_out) == [f"{number:03d}" for number in range(50)]
