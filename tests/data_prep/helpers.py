"""Sources with few documents, their command lines, and the texts that come out."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cat_lm.data.opening import open_corpus
from cat_lm.data.tokenizers import DocumentEncoder
from data_prep.sources.base import Source
from data_prep.sources.documents import Document, Malformed, Reading
from data_prep.sources.open import open_source
from tests.conftest import REPOSITORY, generated_text
from tests.prepared_data import digests

# Documents in train: a large set, a middle one, a small one, and some without a name.
SETS = {"Large": 300, "Middle": 120, "Small": 30, None: 20}
# Several shards, a set that is gone through twice, and a second round of encoding.
WISHES = ("--tokens", "60K", "--mixture", "Large=2,Middle=1,Small=1", "--shard-tokens", "9K")


def flags(path: Path, *more: object, tokenizer: object = "bytes") -> tuple:
    given = ("--source", "files", "--path", path, "--tokenizer", tokenizer, "--workers", 1)
    return (*given, *more)


def set_flags(path: Path, *more: object) -> tuple:
    given = ("--source", "slimpajama", "--path", path, "--tokenizer", "bytes", "--workers", 1)
    return (*given, *more)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "data_prep.prepare", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=REPOSITORY, capture_output=True, text=True)


def made(folder: Path) -> dict[str, str]:
    """Digests of the result's files, without locks."""
    return {name: digest for name, digest in digests(folder).items() if name[0] != "."}


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def texts_of(folder: Path, split: str) -> Iterator[str]:
    corpus = open_corpus(folder, split)
    encoder = DocumentEncoder(folder / "tokenizer", corpus.eod_id, corpus.vocab_size)
    for index in range(corpus.num_documents):
        ids = corpus.tokens(*corpus.document(index))
        assert ids[-1] == corpus.eod_id and (ids[:-1] != corpus.eod_id).all()
        yield encoder.decode(ids[:-1])


def json_lines(texts: list, key: str = "text", **extra: object) -> bytes:
    return "".join(json.dumps({key: text, **extra}) + "\n" for text in texts).encode()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def opened(kind: str, path: object, reading: Reading | None = None, **options: Any) -> Source:
    return open_source(kind, str(path), reading or Reading(), **options)


def documents(source: Source) -> list[Document | Malformed]:
    return [item for part in source.parts for item in source.read(part)]


def texts(path: object, reading: Reading | None = None, **options: Any) -> list[str]:
    return [document.text for document in documents(opened("files", path, reading, **options))]


def names(source: Source) -> list[str]:
    return [part.name for part in source.parts]


def write_sets(folder: Path, order: int = 1) -> Path:
    """SlimPajama's layout: six files of train, one of validation; texts of sets all mixed up."""
    rng = random.Random(5)
    records = []
    for seed, (name, count) in enumerate(SETS.items()):
        meta = {} if name is None else {"redpajama_set_name": name}
        found = enumerate(generated_text(count, seed))
        records += [{"text": f"{text} {name} {n}", "meta": meta} for n, text in found]
    records += records[3:6]  # exact copies
    rng.shuffle(records)
    held_out = [
        {"text": f"held out {number}", "meta": {"redpajama_set_name": name}}
        for number, name in enumerate(("Large", "Small", "Small", "Middle"))
    ]
    files = {f"train/chunk{1 + n // 3}/{n}.jsonl": records[n::6] for n in range(6)}
    if order < 0:  # the same documents in files and lines of another order
        files = {f"train/chunk9/{n}.jsonl": records[n::4][::-1] for n in range(4)}
    files |= {"validation/chunk1/0.jsonl": held_out}
    lines = {n: "".join(json.dumps(r) + "\n" for r in found) for n, found in files.items()}
    return write_files(folder, {name: text.encode() for name, text in lines.items()})
