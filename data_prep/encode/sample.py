"""A sample of the input, to estimate held-out share, size, time and sets."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo
from data_prep.common.selection_spec import SelectionSpec
from data_prep.encode.encoding import (
    MAX_DOCUMENT,
    Encoding,
    hash_place,
    place_of,
    split_of,
)
from data_prep.sources import Source
from data_prep.sources.base import counted_with
from data_prep.sources.documents import Document, Malformed, too_large

# Sources up to this size are looked through first, so that no split comes out empty by chance.
FEW_DOCUMENTS, FEW_CHARACTERS = 500, 100_000_000
ALL_MALFORMED = 100  # as many bad records at the beginning are no accident
SAMPLED_FILES = 16
READ_BYTES = 4_000_000  # of text from the beginning of each sampled file
ENCODED_BYTES = 1_000_000  # of text in all


def held_out_fraction(source: Source, encoding: Encoding, spec: SelectionSpec) -> float:
    """--validation-fraction; among few documents, one that holds out at least one and not all.

    With a handful of documents the hash often leaves a split empty. Then the fraction moves to
    between the two documents whose hashes are nearest to it.
    Raises `UserError` where the input begins with nothing but malformed records.
    """
    fraction, size = encoding.validation_fraction, 0
    places: set[float] = set()
    for document in _first_documents(source, encoding, spec):
        size += len(document.text)
        if document.split or len(places) >= FEW_DOCUMENTS or size > FEW_CHARACTERS:
            return fraction
        if spec.holds_out(document.set):
            places.add(place_of(document, encoding.seed))
    ordered = sorted(places)
    if len(ordered) < 2 or ordered[0] < fraction <= ordered[-1]:
        return fraction
    neighbours = ordered[:2] if fraction <= ordered[0] else ordered[-2:]
    return sum(neighbours) / 2


def _first_documents(source: Source, encoding: Encoding, spec: SelectionSpec) -> Iterator[Document]:
    """The documents with text from the beginning, up to the limits, each split's own.

    Only those of wanted sets count towards a limit, as where they are encoded.
    """
    counts: dict[str, Counter] = {}
    first, good = None, False
    malformed = 0
    for part in source.parts:
        seen = counts.setdefault(counted_with(part.split), Counter())
        if encoding.limit_reached(part.split, seen["documents"], seen["bytes"]):
            continue
        for item in source.read(part):
            if isinstance(item, Document) and len(item.text) > MAX_DOCUMENT:
                item = too_large(part.name, item.text)
            if isinstance(item, Malformed):
                first, malformed = first or item, malformed + 1
                if malformed >= ALL_MALFORMED and not good:
                    raise UserError(f"{first.where}: {first.reason}")
                continue
            good = True
            if not item.text:
                continue
            yield item
            if spec.holds_out(item.set):
                seen.update(documents=1, bytes=len(item.text.encode()))
            if encoding.limit_reached(part.split, seen["documents"], seen["bytes"]):
                break
    if malformed and not good:
        raise UserError(f"{first.where}: {first.reason}")


@dataclass(frozen=True)
class Measured:
    """Estimates of the whole from a sample. `text_bytes` is None where the size is unknown."""

    text_bytes: int | None
    bytes_per_second: float  # of text, that one core encodes
    tokens_per_byte: float
    document_bytes: float
    set_tokens: dict[str, float]  # tokens of each set for a byte of text of all sets

    def tokens(self, sets: SelectionSpec) -> float | None:
        """About how many tokens there are in the training sets that are wanted."""
        if self.text_bytes is None:
            return None
        rates = (rate for name, rate in self.set_tokens.items() if sets.includes(name))
        return self.text_bytes * sum(rates)


def measure(source: Source, encoding: Encoding, folder: Path, info: TokenizerInfo) -> Measured:
    """Reads the beginning of some files and encodes a little of it, in a second or two.

    `folder` holds the tokenizer.
    """
    documents, actual, expected = _sample(source, encoding.seed, encoding.validation_fraction)
    bytes_of, documents_of, encoded_of, tokens_of = Counter(), Counter(), Counter(), Counter()
    for document in documents:
        bytes_of[document.set] += len(document.text.encode())
        documents_of[document.set] += 1
    chosen = _spread(documents, encoding.seed)
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    encoder.encode_batch([document.text for document in chosen[:4]])  # not the library's start
    start = time.perf_counter()
    lengths = [len(ids) + 1 for ids in encoder.encode_batch([d.text for d in chosen])]
    seconds = time.perf_counter() - start
    for document, length in zip(chosen, lengths, strict=True):
        encoded_of[document.set] += len(document.text.encode())
        tokens_of[document.set] += length
    overall = tokens_of.total() / max(1, encoded_of.total())
    total = source.text_bytes()
    if total is not None and expected:
        total = int(total * actual / expected)
    if encoding.max_bytes is not None:
        total = encoding.max_bytes if total is None else min(total, encoding.max_bytes)
    mean = bytes_of.total() / max(1, documents_of.total())
    if encoding.max_documents is not None and total is not None:
        total = min(total, int(encoding.max_documents * mean * 2))
    return Measured(
        total,
        encoded_of.total() / max(seconds, 1e-9),
        overall,
        mean,
        {
            name: size / bytes_of.total() * tokens_of[name] / encoded_of[name]
            if encoded_of[name]
            else size / bytes_of.total() * overall
            for name, size in sorted(bytes_of.items())
        },
    )


def _sample(source: Source, seed: int, fraction: float) -> tuple[list[Document], int, int]:
    """Training documents from the beginnings of some files, and a check of the size's estimate.

    The check is the text that files read to their end held, and what they were expected to hold.
    """
    parts = [part for part in source.parts if part.split != "validation"]
    parts.sort(key=lambda part: hashlib.sha256(f"{seed} {part.name}".encode()).digest())
    documents, actual, expected = [], 0, 0
    for part in parts[:SAMPLED_FILES]:
        size = 0
        for item in source.read(part):
            if isinstance(item, Document) and 0 < len(item.text) <= MAX_DOCUMENT:
                size += len(item.text.encode())
                if split_of(item, seed, fraction) == "train":
                    documents.append(item)
            if size >= READ_BYTES:
                break
        else:
            actual += size
            expected += part.text_bytes or 0
    return documents, actual, expected


def _spread(documents: list[Document], seed: int) -> list[Document]:
    """About `ENCODED_BYTES` of the documents, by their hash places; very long ones shortened."""
    order = sorted(documents, key=lambda document: hash_place(document.text.encode(), seed + 1))
    chosen, size = [], 0
    for document in order:
        if size >= ENCODED_BYTES:
            break
        text = document.text[: ENCODED_BYTES // 8]
        chosen.append(Document(text, document.set, document.split))
        size += len(text)
    return chosen
