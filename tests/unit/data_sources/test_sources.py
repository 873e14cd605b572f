"""Sources: which documents come out of which files, in which order."""

import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.core.errors import UserError
from data_prep.encode.encoding import Rules
from data_prep.encode.plan import sample_texts
from data_prep.sources.base import Part, in_natural_order
from data_prep.sources.documents import Document, Reading
from data_prep.sources.open import open_source
from tests.unit.data_sources.folders import (
    TEXTS,
    documents,
    json_lines,
    names,
    texts,
    write_all_kinds,
)


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

    def sample(seed, size, held_out=0.0):
        return list(sample_texts(source, Rules(seed, held_out), size))

    chosen = sample(0, 20_000)
    assert chosen == sample(0, 20_000) != sample(1, 20_000)
    assert 20_000 <= sum(map(len, chosen)) <= 21_000
    assert len({text[:3] for text in chosen}) >= 20
    some = sample(0, 10**6, held_out=0.5)
    assert 30 < len(some) < 70 and set(some) < set(sample(0, 10**6))
