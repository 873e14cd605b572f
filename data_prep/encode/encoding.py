"""Encode one unit of input files into one part: read, hash, split, select and tokenize."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.shards import token_dtype
from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo
from data_prep.encode.parts import (
    DOCUMENT,
    PartRecord,
    disk_errors,
    finish_part,
    finished_part,
    new_part,
)
from data_prep.sources.base import Source, Unit
from data_prep.sources.documents import Document, Malformed

CHUNK_BYTES = 1 << 20
CHUNK_DOCUMENTS = 1000
PLACES = 2**64  # the number of hash places


def hash_place(text: bytes, seed: int) -> int:
    """Return the hash of the seed and a text, a document's place, uniform in [0, `PLACES`)."""
    digest = hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Rules:
    """The rules for the split of a document, and for the limits of the input."""

    seed: int
    validation_fraction: float
    max_documents: int | None = None
    max_bytes: int | None = None

    def place_of(self, document: Document) -> float:
        """Return the hash place of a document as a number in [0, 1)."""
        return hash_place(document.text.encode(), self.seed) / PLACES

    def split_of(self, document: Document) -> str:
        """Return the document's own split, or the split that its hash place determines.

        Exact copies of a document are therefore in the same split, for any order of the input.
        """
        is_held_out = self.place_of(document) < self.validation_fraction
        return document.split or ("validation" if is_held_out else "train")

    @property
    def is_limited(self) -> bool:
        return self.max_documents is not None or self.max_bytes is not None

    def limit_reached(self, split: str | None, documents: int, text_bytes: int) -> bool:
        """Return True if a split has reached --max-documents or --max-bytes.

        The limits of a source's own validation split are the validation fraction of these.
        """
        share = self.validation_fraction if split == "validation" else 1.0
        limits = ((self.max_documents, documents), (self.max_bytes, text_bytes))
        return any(limit and count >= limit * share for limit, count in limits)


@dataclass(frozen=True)
class Coverage:
    """The documents to encode: for each set in `sets`, and for all `other` sets, a pair.

    It has the hash place below which training documents are encoded, and whether validation
    documents are.
    """

    sets: dict[str, tuple[int, bool]]
    other: tuple[int, bool]

    def of(self, name: str) -> tuple[int, bool]:
        """Return the pair of a set."""
        return self.sets.get(name, self.other)

    def join(self, more: Coverage) -> Coverage:
        """Return the union of two coverages; sets that equal `other` have no entry."""
        other = _join_pairs(self.other, more.other)
        sets = {
            name: _join_pairs(self.of(name), more.of(name)) for name in {**self.sets, **more.sets}
        }
        return Coverage({name: pair for name, pair in sets.items() if pair != other}, other)


def _join_pairs(one: tuple[int, bool], other: tuple[int, bool]) -> tuple[int, bool]:
    return max(one[0], other[0]), one[1] or other[1]


@dataclass(frozen=True)
class Encoding:
    """The settings of a preparation that are sent to every worker."""

    source: Source
    work: Path
    tokenizer_folder: Path
    tokenizer: TokenizerInfo
    rules: Rules
    coverage: Coverage

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the tokens on disk."""
        return token_dtype(self.tokenizer.vocab_size)

    def key(self, unit: Unit) -> str:
        """Return a hash of everything that determines the bytes of a part."""
        decides = {
            "source": self.source.kind,
            "reading": self.source.reading and asdict(self.source.reading),
            "tokenizer": [self.tokenizer.sha256, self.tokenizer.eod_id, self.dtype.name],
            "rules": asdict(self.rules),
            "unit": [unit.number, unit.split, unit.listing_sha256],
            "coverage": asdict(self.coverage),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


class Candidate(NamedTuple):
    """A document that is to be encoded."""

    text: str
    set: str
    bytes: int
    place: int
    position: int
    validation: bool


def encode_unit(
    task: tuple[Encoding, Unit], report: Callable[[int], object]
) -> tuple[int, PartRecord]:
    """Make the part of a unit, if it does not exist; return the unit's number and the record.

    `report` is called with the bytes of text since the last call.
    """
    encoding, unit = task
    key, work, number = encoding.key(unit), encoding.work, unit.number
    if (done := finished_part(work, number, key)) is not None:  # Another process has made it.
        report(done.text_bytes)
        return number, done
    info = encoding.tokenizer
    encoder = _encoder(encoding.tokenizer_folder, info.eod_id, info.vocab_size)
    record, reported = PartRecord(key), 0
    with disk_errors(work):
        with new_part(work, number) as files:
            for chunk in split_into_chunks(
                _read_candidates(encoding, unit, record, files["malformed"])
            ):
                tokens, lengths = encoder.encode_documents([c.text for c in chunk], encoding.dtype)
                files["bin"].write(tokens.tobytes())
                files["docs"].write(_document_table(chunk, lengths, record.sets).tobytes())
                record.tokens += len(tokens)
                report(record.text_bytes - reported)
                reported = record.text_bytes
        report(record.text_bytes - reported)
        return number, finish_part(work, number, record)


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, eod_id: int, vocab_size: int) -> DocumentEncoder:
    return DocumentEncoder(folder, eod_id, vocab_size)


def _read_candidates(
    encoding: Encoding, unit: Unit, record: PartRecord, malformed: IO[bytes]
) -> Iterator[Candidate]:
    """Yield the documents of a unit that are to be encoded, and count all records."""
    rules = encoding.rules
    held_out_below = 0 if unit.split else rules.validation_fraction
    for item in (item for part in unit.parts for item in encoding.source.read(part)):
        if isinstance(item, Malformed):
            record.malformed += 1
            # Quoted keys may contain surrogates, which UTF-8 cannot encode.
            line = f"{item.where}: {item.reason}".encode("utf-8", "backslashreplace")
            record.first_malformed = record.first_malformed or line.decode()
            malformed.write(line + b"\n")
            continue
        if not item.text:
            record.empty += 1
            continue
        text = item.text.encode()
        place = hash_place(text, rules.seed)
        validation = unit.split == "validation" or place / PLACES < held_out_below
        candidate = Candidate(item.text, item.set, len(text), place, record.found, validation)
        if _count_candidate(candidate, record, encoding.coverage):
            yield candidate
            if rules.limit_reached(unit.split, record.documents, record.encoded_bytes):
                return


def _count_candidate(candidate: Candidate, record: PartRecord, coverage: Coverage) -> bool:
    """Add a document to the record's counts; return True if it is to be encoded."""
    split = "validation" if candidate.validation else "train"
    by_split = record.seen.setdefault(candidate.set, {})
    counts = by_split.setdefault(split, {"documents": 0, "bytes": 0})
    counts["documents"] += 1
    counts["bytes"] += candidate.bytes
    record.text_bytes += candidate.bytes
    record.found += 1
    below, held_out = coverage.of(candidate.set)
    wanted = held_out if candidate.validation else candidate.place < below
    if wanted:
        record.documents += 1
        record.encoded_bytes += candidate.bytes
        if candidate.set not in record.sets:
            record.sets.append(candidate.set)
            if len(record.sets) > np.iinfo(DOCUMENT["set"]).max:
                raise UserError(
                    f"{len(record.sets)} different sets in a few files: the set's key seems to "
                    "hold something else (choose with --set-key)"
                )
    return wanted


def split_into_chunks(documents: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Yield documents in chunks of bounded size, each for one call of the tokenizer."""
    chunk: list[Candidate] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _document_table(chunk: list[Candidate], lengths: np.ndarray, sets: list[str]) -> np.ndarray:
    rows = (
        (c.place, c.position, length, c.bytes, sets.index(c.set), c.validation, 0)
        for c, length in zip(chunk, lengths.tolist(), strict=True)
    )
    return np.array(list(rows), DOCUMENT)
