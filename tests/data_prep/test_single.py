"""A source of a single document: its last part is held out at a line's end, and the log says so."""

import gzip
import json
import re

import pytest

from cat_lm.core.errors import UserError
from data_prep.sources import single
from data_prep.sources.documents import Document, Malformed, Reading
from data_prep.sources.open import open_source
from tests.conftest import generated_text
from tests.data_prep.helpers import flags, texts_of
from tests.prepared_data import digests

TEXT = "\n\n".join(generated_text(300)) + "\n"


def opened(path, fraction=0.05, reading=None, **more):
    return open_source(
        "files", str(path), reading or Reading(), validation_fraction=fraction, **more
    )


def documents(source):
    return [item for part in source.parts for item in source.read(part)]


def as_jsonl(text, **more):
    return json.dumps({"text": text, **more}) + "\n"


def test_the_last_part_of_one_text_is_held_out_and_everyone_is_told(tmp_path, prepare, capsys):
    (tmp_path / "one.txt").write_text(TEXT)
    given = flags(tmp_path / "one.txt")
    prepare(tmp_path / "out", *given, "--estimate")
    estimated = capsys.readouterr().out
    out = prepare(tmp_path / "out", *given)
    ((train,), (held_out,)) = (list(texts_of(out, split)) for split in ("train", "validation"))
    assert train + held_out == TEXT
    assert train.endswith("\n")
    assert abs(len(held_out) - 0.05 * len(TEXT)) < max(map(len, TEXT.split("\n")))
    (line,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith("held out: ")]
    assert line == (
        f"held out: the last {len(held_out):,} of the {len(TEXT):,} bytes of "
        f"{tmp_path}/one.txt, a single document, from the end of a line on"
    )
    assert line in estimated.splitlines()
    tokens = re.search(r"about ([\d,]+) training tokens and ([\d,]+) held-out ones", estimated)
    for found, part in zip(tokens.groups(), (train, held_out), strict=True):
        assert int(found.replace(",", "")) == pytest.approx(len(part), abs=9)
    manifest = json.loads((out / "manifest.json").read_text())
    divided = {"at_end_of": "line", "train_bytes": len(train), "validation_bytes": len(held_out)}
    assert manifest["source"]["divided"] == divided
    assert manifest["source"]["files"] == 1
    assert manifest["source"]["file_bytes"] == len(TEXT)


@pytest.mark.parametrize("name", ["one.txt", "sub/one.md", "x.jsonl", "x.jsonl.gz"])
def test_one_document_of_any_file_and_in_a_folder(tmp_path, name):
    file = tmp_path / "in" / name
    file.parent.mkdir(parents=True)
    # What is no document, or has no text, is counted once.
    lines = as_jsonl("") + "{\n" + as_jsonl(TEXT, meta={"redpajama_set_name": "S"})
    content = (lines if "jsonl" in name else TEXT).encode()
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "in" / "empty.txt").touch()
    source = opened(tmp_path / "in")
    assert [part.name for part in source.parts] == [f"train/{name}", f"validation/{name}"]
    found = documents(source)
    texts = [item for item in found if isinstance(item, Document) and item.text]
    assert [item.split for item in texts] == ["train", "validation"]
    assert "".join(item.text for item in texts) == TEXT
    assert {item.set for item in texts} == {
        "S" if "jsonl" in name else name[-2:].replace("xt", "txt")
    }
    assert len(found) == (4 if "jsonl" in name else 2)
    assert sum(isinstance(item, Malformed) for item in found) == ("jsonl" in name)


def test_records_and_separated_texts_are_left_to_the_hash(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    separated = opened(tmp_path, reading=Reading(separator="\n\n"))
    assert [part.split for part in separated.parts] == [None]
    assert separated.notes(0.05) == [] and "divided" not in separated.describe()
    (tmp_path / "b.jsonl").write_text(as_jsonl("one") + as_jsonl("two"))
    assert [part.split for part in opened(tmp_path / "b.jsonl").parts] == [None]
    assert [part.split for part in opened(tmp_path).parts] == ["train", None, "validation"]
    assert len(opened(tmp_path / "a.txt", fraction=None).parts) == 1
    (tmp_path / "c.jsonl").write_text(as_jsonl("") * 8 + as_jsonl(TEXT))
    assert len(opened(tmp_path / "c.jsonl").parts) == 2
    monkeypatch.setattr(single, "LOOKED_AT", 8)  # what is not known is not divided
    assert len(opened(tmp_path / "c.jsonl").parts) == 1


def test_a_separator_that_divides_nothing_is_an_error(tmp_path, prepare):
    (tmp_path / "one.txt").write_text(TEXT.rstrip())
    for separator in ("no such", TEXT.rstrip()[-60:]):  # not there; nothing behind it
        with pytest.raises(UserError, match=r"^--document-separator '.*one\.txt is a single doc"):
            given = flags(tmp_path / "one.txt", "--document-separator", separator)
            prepare(tmp_path / "out", *given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "fraction", "expected"),
    [
        ("aaaa\nbbbb\ncccc\ndddd\n", 0.25, ("line", 15)),
        ("aaaa\nbbbb\ncccc\ndddd\n", 0.4, ("line", 10)),  # 12: nearer to 10 than to 15
        ("aaaa\r\nbbbb\r\ncccc\r\ndddd", 0.25, ("line", 18)),  # behind both characters
        ("aaaa\nbbbb cccc dddd", 0.25, ("word", 15)),  # the line's end would hold out 74%
        ("aaaa bbbb cccc d\n\n\n\n", 0.25, ("word", 15)),  # a held-out line would be empty
        ("\n\n\n\nbbbb cccc\n", 0.6, ("word", 9)),  # the training lines would be
        ("äöü ä\nöüäö\n", 0.4, ("line", 10)),  # of bytes, and whole characters
        ("aaaabbbbccccdddd", 0.25, None),
        ("aaaa\nbbbbccccdddd", 0.25, None),
    ],
)
def test_the_nearest_end_of_a_line_or_else_of_a_word(text, fraction, expected):
    assert single.find_cut(text.encode(), fraction) == expected
    if expected:
        assert text.encode()[: expected[1]].decode().isspace() is False


def test_an_empty_compressed_file_beside_one_text_is_damaged(tmp_path):
    (tmp_path / "a.txt").write_text("a line of it\n" * 50)
    (tmp_path / "b.jsonl").write_bytes(b"")
    assert open_source("files", str(tmp_path), Reading(), validation_fraction=0.1).divisions
    (tmp_path / "c.jsonl.zst").write_bytes(b"")
    source = open_source("files", str(tmp_path), Reading(), validation_fraction=0.1)
    with pytest.raises(UserError, match=r"c\.jsonl\.zst: broken zstd file \(it is empty\)"):
        [*map(list, map(source.read, source.parts))]


def novels(folder):
    """Two novels and two files that say what they are."""
    folder.mkdir()
    for name, text in (("a", TEXT), ("b", TEXT[::-1])):
        (folder / f"{name}.txt").write_text(text)
        (folder / f"README_{name}.md").write_text(f"{name}: a novel by somebody\n")
    return folder


def test_large_texts_beside_small_ones_are_held_out_in_part(tmp_path, prepare, capsys):
    """Validation was on a single README."""
    given = flags(novels(tmp_path / "in"))
    out = prepare(tmp_path / "out", *given)
    held_out, train = (list(texts_of(out, split)) for split in ("validation", "train"))
    assert sorted(map(len, held_out + train))[:2] == [23, 23]
    ends = [text for text in held_out if len(text) > 23]
    assert [TEXT.endswith(ends[0]), TEXT[::-1].endswith(ends[1])] == [True, True]
    assert sum(map(len, ends)) == pytest.approx(0.1 * len(TEXT), rel=0.1)
    line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("held out: "))
    assert f"{sum(map(len, ends)):,} of the {2 * len(TEXT):,} bytes of 2 texts" in line
    divided = json.loads((out / "manifest.json").read_text())["source"]["divided"]
    assert (divided["files"], divided["validation_bytes"]) == (2, sum(map(len, ends)))
    assert digests(prepare(tmp_path / "2", *given[:-1], 2)) == digests(out)
    for stage in (("encode", "--task", "1/2"), ("encode", "--task", "0/2"), ("assemble",)):
        prepare(tmp_path / "tasks", *given, "--stage", *stage)
    assert digests(tmp_path / "tasks") == digests(out)
