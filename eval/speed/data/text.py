"""The documents that are tokenized and prepared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

from cat_lm.errors import UserError

CHUNK_BYTES = 1 << 20  # of text: what a worker of the preparation encodes at a time


def documents(path: str | None, limit: int) -> list[str]:
    """Texts of `path`, of the standard library for None, up to `limit` bytes of them."""
    from data_prep.sources import open_source
    from data_prep.sources.documents import Document, Reading

    kind = "python-stdlib" if path is None else "files"
    source = open_source(kind, path, Reading())
    texts, size = [], 0
    for part in source.parts:
        for document in source.read(part):
            if not isinstance(document, Document) or not document.text:
                continue
            size += len(document.text.encode())
            if size > limit and texts:
                return texts
            texts.append(document.text)
    if not texts:
        raise UserError(f"--text {path}: no document with any text")
    return texts


def chunks(texts: list[str]) -> list[list[str]]:
    """Texts in groups of about `CHUNK_BYTES`."""
    found: list[list[str]] = [[]]
    size = 0
    for text in texts:
        found[-1].append(text)
        size += len(text)
        if size >= CHUNK_BYTES:
            found.append([])
            size = 0
    return [chunk for chunk in found if chunk]


def write_files(texts: list[str], limit: int, files: int, folder: Path) -> int:
    """Writes texts, over and over until they are `limit` bytes, into so many jsonl files.

    Documents are dealt out in turn, and repeats are numbered, so that none is a copy. Returns the
    bytes of text.
    """
    folder.mkdir()
    written = 0
    with ExitStack() as stack:
        paths = [folder / f"{number:02d}.jsonl" for number in range(files)]
        streams = [stack.enter_context(open(path, "w", encoding="utf-8")) for path in paths]
        for number, text in enumerate(_numbered(texts)):
            if written >= limit and number >= files:
                break
            streams[number % files].write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    return written


def _numbered(texts: list[str]) -> Iterator[str]:
    for number, text in enumerate(cycle(texts)):
        yield text if number < len(texts) else f"{number}\n{text}"
