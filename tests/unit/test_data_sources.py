"""Sources: which documents come out of which files, in which order; and what cannot be read."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.errors import UserError
from data_prep.documents import Document, Reading
from data_prep.sources import open_source, sample_texts

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
    source = open_source(
        *("files", str(tmp_path / "a.txt"), Reading()), validation_path=str(tmp_path / "a.txt")
    )
    assert [document.split for document in documents(source)] == ["train", "validation"]


def test_zstd_frames_larger_than_a_block(tmp_path):
    lines = json_lines([f"{number} " * 1000 for number in range(3000)])
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(lines))
    assert texts("files", tmp_path) == [f"{number} " * 1000 for number in range(3000)]


BAD = {
    "x.txt": (b"ab\xffcd", r"x\.txt: not UTF-8 \(byte 0xff at 2\)"),
    "y.jsonl": (json_lines(["ok"]) + b"{broken\n", r"y\.jsonl:2: not a JSON line"),
    "u.jsonl": (b'{"text": "\xff"}\n', r"u\.jsonl:1: not UTF-8"),
    "l.jsonl": (b"[1]\n", r"l\.jsonl:1: a JSON object is needed, not list"),
    "k.jsonl": (
        json_lines(["x"], key="body"),
        r"k\.jsonl:1: no text under the key 'text'; .* body",
    ),
    "n.jsonl": (b'{"text": null}\n', r"n\.jsonl:1: no text under the key"),
    "s.jsonl": (b'{"text": "a\\ud800"}\n', r"s\.jsonl:1: half a surrogate pair at 1"),
    "g.jsonl.gz": (gzip.compress(json_lines())[:-9], "g.jsonl.gz: broken gzip file"),
    "h.jsonl.gz": (b"not gzip", "h.jsonl.gz: broken gzip file"),
    "z.jsonl.zst": (zstandard.compress(json_lines())[:-3], "broken zstd file .cut short"),
    "w.jsonl.zst": (b"not zstd at all", r"w\.jsonl\.zst: broken zstd file"),
    "p.parquet": (b"PAR1 broken", r"p\.parquet: broken parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_cannot_be_read_are_named_with_the_place(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts("files", tmp_path)


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
    with pytest.raises(UserError, match="no folder with train/"):
        open_source("slimpajama", str(tmp_path), Reading())


def slimpajama(folder, validation=True):
    for split in ("train", "validation", "test"):
        if split == "validation" and not validation:
            continue
        for chunk in (1, 2):
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
        for chunk in (1, 2)
        for suffix, name in (("", "RedPajamaC4"), (" unnamed", "unknown"))
    ]


def test_slimpajama_without_validation_leaves_the_split_open(tmp_path):
    source = open_source("slimpajama", str(slimpajama(tmp_path, validation=False)), Reading())
    assert not source.has_validation
    assert {document.split for document in documents(source)} == {None}


def test_the_hub_is_streamed_at_one_revision(tmp_path, monkeypatch):
    import datasets

    slimpajama(tmp_path)
    asked = []
    real = datasets.load_dataset

    def load_dataset(name, split, streaming, revision):
        asked.append((name, split, streaming, revision))
        files = sorted(str(file) for file in (tmp_path / split).rglob("*.zst"))
        return real("json", data_files=files, split="train", streaming=streaming)

    monkeypatch.setattr(
        "data_prep.sources._resolve_revision", lambda name, revision: f"{revision}!"
    )
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        datasets, "get_dataset_split_names", lambda name, revision: ["train", "validation", "test"]
    )
    source = open_source("slimpajama", "hub:owner/name@v2", Reading())
    local = open_source("slimpajama", str(tmp_path), Reading())
    assert documents(source) == documents(local)
    assert asked == [("owner/name", split, True, "v2!") for split in ("train", "validation")]
    assert source.describe() == {
        "kind": "slimpajama",
        "path": "hub:owner/name@v2",
        "revision": "v2!",
    }
    assert source.text_bytes() is None


def test_a_hub_that_cannot_be_reached_is_one_error(monkeypatch):
    def unreachable(name, revision):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("data_prep.sources._resolve_revision", unreachable)
    with pytest.raises(UserError, match=r"cannot be read from the Hub \(no route to host\)"):
        open_source("slimpajama", "hub:owner/name", Reading())


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
    monkeypatch.setattr("data_prep.sources.HASHED_BYTES", 7)  # as with terabytes: not read
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
