"""One unit of input files to one part: reading, hashing, splitting, choosing, tokens."""

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
PLACES = 2**64  # hash places are below it


def hash_place(text: bytes, seed: int) -> int:
    """Hash the seed and the text to a document's place: uniform in [0, `PLACES`)."""
    digest = hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Rules:
    """The split of a document, and where --max-documents and --max-bytes end the input."""

    seed: int
    validation_fraction: float
    max_documents: int | None = None
    max_bytes: int | None = None

    def place_of(self, document: Document) -> float:
        """Return the hash place of a document as a number in [0, 1)."""
        return hash_place(document.text.encode(), self.seed) / PLACES

    def split_of(self, document: Document) -> str:
        """Return a document's own split, or else the one of the hash of the seed and its text.

        So a document and its exact copies fall on one side, whatever the order of the input.
        """
        is_held_out = self.place_of(document) < self.validation_fraction
        return document.split or ("validation" if is_held_out else "train")

    @property
    def is_limited(self) -> bool:
        return self.max_documents is not None or self.max_bytes is not None

    def limit_reached(self, split: str | None, documents: int, text_bytes: int) -> bool:
        """Return True if --max-documents or --max-bytes is reached.

        A validation split of the source's own is limited to the validation fraction of the same.
        """
        share = self.validation_fraction if split == "validation" else 1.0
        limits = ((self.max_documents, documents), (self.max_bytes, text_bytes))
        return any(limit and count >= limit * share for limit, count in limits)


@dataclass(frozen=True)
class Coverage:
    """The documents that are encoded, of each set and of all others.

    That is the hash place below which the training documents are, and whether held-out ones are.
    """

    sets: dict[str, tuple[int, bool]]
    other: tuple[int, bool]

    def of(self, name: str) -> tuple[int, bool]:
        """Return the place and the choice of a set."""
        return self.sets.get(name, self.other)

    def join(self, more: Coverage) -> Coverage:
        """Return what covers both, with entries for sets that are unlike the others alone."""
        other = _join(self.other, more.other)
        sets = {name: _join(self.of(name), more.of(name)) for name in {**self.sets, **more.sets}}
        return Coverage({name: pair for name, pair in sets.items() if pair != other}, other)


def _join(one: tuple[int, bool], other: tuple[int, bool]) -> tuple[int, bool]:
    return max(one[0], other[0]), one[1] or other[1]


@dataclass(frozen=True)
class Encoding:
    """The settings of a preparation that every worker needs."""

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
        """Return the identity of a part: everything that decides its bytes."""
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
    """A document on its way to its tokens."""

    text: str
    set: str
    bytes: int
    place: int
    position: int
    validation: bool


def encode_unit(
    task: tuple[Encoding, Unit], report: Callable[[int], object]
) -> tuple[int, PartRecord]:
    """Make the part of a unit unless it is there already; return the unit's number and its record.

    `report` is called with bytes of text now and then.
    """
    encoding, unit = task
    key, work, number = encoding.key(unit), encoding.work, unit.number
    if (done := finished_part(work, number, key)) is not None:  # by another process, meanwhile
        report(done.text_bytes)
        return number, done
    info = encoding.tokenizer
    encoder = _encoder(encoding.tokenizer_folder, info.eod_id, info.vocab_size)
    record, reported = PartRecord(key), 0
    with disk_errors(work):
        with new_part(work, number) as files:
            for chunk in chunks(_candidates(encoding, unit, record, files["malformed"])):
                tokens, lengths = encoder.encode_documents([c.text for c in chunk], encoding.dtype)
                files["bin"].write(tokens.tobytes())
                files["docs"].write(_describe(chunk, lengths, record.sets).tobytes())
                record.tokens += len(tokens)
                report(record.text_bytes - reported)
                reported = record.text_bytes
        report(record.text_bytes - reported)
        return number, finish_part(work, number, record)


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, eod_id: int, vocab_size: int) -> DocumentEncoder:
    return DocumentEncoder(folder, eod_id, vocab_size)


def _candidates(
    encoding: Encoding, unit: Unit, record: PartRecord, malformed: IO[bytes]
) -> Iterator[Candidate]:
    """Yield the documents of a unit that are to be encoded; everything else is counted."""
    rules = encoding.rules
    held_out_below = 0 if unit.split else rules.validation_fraction
    for item in (item for part in unit.parts for item in encoding.source.read(part)):
        if isinstance(item, Malformed):
            record.malformed += 1
            # Keys that are quoted may hold what UTF-8 cannot.
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
        if _count(candidate, record, encoding.coverage):
            yield candidate
            if rules.limit_reached(unit.split, record.documents, record.encoded_bytes):
                return


def _count(candidate: Candidate, record: PartRecord, coverage: Coverage) -> bool:
    """Count a document; return True if it is to be encoded."""
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


def chunks(documents: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Group documents into chunks of bounded size, encoded in one call."""
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


def _describe(chunk: list[Candidate], lengths: np.ndarray, sets: list[str]) -> np.ndarray:
    rows = (
        (c.place, c.position, length, c.bytes, sets.index(c.set), c.validation, 0)
        for c, length in zip(chunk, lengths.tolist(), strict=True)
    )
    return np.array(list(rows), DOCUMENT)
