"""Files of every kind with documents in them, and what a source makes of a path."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import zstandard

from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source

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


def names(source):
    return [part.name for part in source.parts]
