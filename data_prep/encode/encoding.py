"""One unit of input files to one part: reading, hashing, splitting, choosing, tokens."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo
from data_prep.common.locks import file_lock
from data_prep.encode.parts import DOCUMENT, PartWriter, finished_part, remove_temporary
from data_prep.sources import Source
from data_prep.sources.documents import MAX_DOCUMENT, Document, Malformed, too_large
from data_prep.sources.units import Unit

CHUNK_BYTES = 1 << 20
CHUNK_DOCUMENTS = 1000
PLACES = 2**64  # hash places are below it


def hash_place(text: bytes, seed: int) -> int:
    """Hash the seed and the text to a document's place: uniform in [0, `PLACES`)."""
    digest = hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


def place_of(document: Document, seed: int) -> float:
    """The hash place of a document as a number in [0, 1)."""
    return hash_place(document.text.encode(), seed) / PLACES


def split_of(document: Document, seed: int, validation_fraction: float) -> str:
    """The split of a document: its own, or else decided by a hash of the seed and the text.

    So a document and its exact copies fall on one side, whatever the order of the input.
    """
    if document.split:
        return document.split
    return "validation" if place_of(document, seed) < validation_fraction else "train"


class Range(NamedTuple):
    """The documents of a set that a round encodes: hash places [low, high), held-out ones or not"""

    low: int
    high: int
    held_out: bool


@dataclass(frozen=True)
class Ranges:
    """The documents that a round encodes: a range for each set, and one for all others."""

    sets: dict[str, Range]
    other: Range

    def of(self, name: str) -> Range:
        return self.sets.get(name, self.other)

    def to_json(self) -> dict:
        return {"sets": {n: list(r) for n, r in sorted(self.sets.items())}, "other": [*self.other]}

    @classmethod
    def from_json(cls, value: dict) -> Ranges:
        return cls({n: Range(*r) for n, r in value["sets"].items()}, Range(*value["other"]))


@dataclass(frozen=True)
class Encoding:
    """The settings of a preparation that every worker needs."""

    source: Source
    work: Path
    tokenizer_folder: Path
    tokenizer: TokenizerInfo
    dtype: str
    seed: int
    validation_fraction: float
    max_documents: int | None = None
    max_bytes: int | None = None

    def key(self, unit: Unit, round_number: int, ranges: Ranges) -> str:
        """The identity of a part: everything that decides its bytes."""
        decides = {
            "source": self.source.kind,
            "reading": asdict(self.source.reading) if hasattr(self.source, "reading") else None,
            "tokenizer": [self.tokenizer.sha256, self.tokenizer.eod_id, self.dtype],
            "split": [self.seed, repr(self.validation_fraction)],
            "limits": [self.max_documents, self.max_bytes],
            "unit": [unit.number, unit.split, unit.listing_sha256],
            "round": [round_number, ranges.to_json()],
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def limit_reached(self, split: str | None, documents: int, text_bytes: int) -> bool:
        """Return True if --max-documents or --max-bytes is reached.

        A validation split of the source's own is limited to the validation fraction of the same.
        """
        share = self.validation_fraction if split == "validation" else 1.0
        limits = ((self.max_documents, documents), (self.max_bytes, text_bytes))
        return any(limit and count >= limit * share for limit, count in limits)


@dataclass(frozen=True)
class UnitTask:
    """One round of encoding of one unit."""

    encoding: Encoding
    unit: Unit
    round: int
    ranges: Ranges

    @property
    def key(self) -> str:
        return self.encoding.key(self.unit, self.round, self.ranges)


@dataclass
class Candidate:
    """A document on its way to its tokens."""

    text: str
    set: str
    bytes: int
    place: int
    position: int
    validation: bool


@dataclass
class UnitCounts:
    """Counts of a unit's documents, encoded or not."""

    text_bytes: int = 0
    documents: int = 0  # with text, of any set: the number of the next one
    encoded: int = 0
    encoded_bytes: int = 0
    empty: int = 0
    malformed: int = 0
    first_malformed: str | None = None
    tokens: int = 0
    sets: list[str] = field(default_factory=list)
    seen: dict[str, dict[str, Counter]] = field(default_factory=dict)

    def record(self, task: UnitTask) -> dict:
        return {
            "key": task.key,
            "documents": self.encoded,
            "tokens": self.tokens,
            "encoded_bytes": self.encoded_bytes,
            "text_bytes": self.text_bytes,
            "empty": self.empty,
            "malformed": self.malformed,
            "first_malformed": self.first_malformed,
            "sets": self.sets,
            "seen": {
                name: {split: dict(counts) for split, counts in sorted(by_split.items())}
                for name, by_split in sorted(self.seen.items())
            },
        }


def encode_unit(task: UnitTask, report: Callable[[int], None]) -> tuple[int, dict]:
    """Makes the part of a unit unless it is there already; the unit's number and its record.

    `report` is called with bytes of text now and then.
    """
    encoding, number = task.encoding, task.unit.number
    done = finished_part(encoding.work, number, task.round, task.key)
    if done is None:
        with file_lock(encoding.work / f"part-{number:05d}.lock") as alone:
            # Another process may have made it while this one waited for it.
            done = finished_part(encoding.work, number, task.round, task.key)
            if done is None:
                if alone:
                    remove_temporary(encoding.work, number)
                return number, _encode(task, report)
    report(done["text_bytes"])
    return number, done


def _encode(task: UnitTask, report: Callable[[int], None]) -> dict:
    encoding = task.encoding
    encoder = _encoder(
        encoding.tokenizer_folder, encoding.tokenizer.eod_id, encoding.tokenizer.vocab_size
    )
    dtype = np.dtype(encoding.dtype).newbyteorder("<")
    with PartWriter(encoding.work, task.unit.number, task.round) as writer:
        tally, reported = UnitCounts(), 0
        for chunk in chunks(_candidates(task, tally, writer)):
            tokens, lengths = encoder.encode_documents([c.text for c in chunk], dtype)
            writer.write("bin", np.ascontiguousarray(tokens, dtype).tobytes())
            writer.write("docs", _describe(chunk, lengths, tally.sets).tobytes())
            tally.tokens += len(tokens)
            report(tally.text_bytes - reported)
            reported = tally.text_bytes
        report(tally.text_bytes - reported)
        return writer.finish(tally.record(task))


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, eod_id: int, vocab_size: int) -> DocumentEncoder:
    return DocumentEncoder(folder, eod_id, vocab_size)


def _candidates(task: UnitTask, tally: UnitCounts, writer: PartWriter) -> Iterator[Candidate]:
    """The documents of a unit that this round encodes; everything else is counted."""
    encoding, split = task.encoding, task.unit.split
    held_out_below = 0 if split else encoding.validation_fraction
    for part in task.unit.parts:
        for item in encoding.source.read(part):
            if isinstance(item, Document) and len(item.text) > MAX_DOCUMENT:
                item = too_large(part.name, item.text)
            if isinstance(item, Malformed):
                tally.malformed += 1
                # Keys that are quoted may hold what UTF-8 cannot.
                line = f"{item.where}: {item.reason}".encode("utf-8", "backslashreplace")
                tally.first_malformed = tally.first_malformed or line.decode()
                if task.round == 0:
                    writer.write("malformed", line + b"\n")
                continue
            if not item.text:
                tally.empty += 1
                continue
            text = item.text.encode()
            tally.text_bytes += len(text)
            place = hash_place(text, encoding.seed)
            validation = split == "validation" or place / PLACES < held_out_below
            candidate = Candidate(
                item.text, item.set, len(text), place, tally.documents, validation
            )
            tally.documents += 1
            if _count(candidate, tally, task.ranges):
                yield candidate
                if encoding.limit_reached(split, tally.encoded, tally.encoded_bytes):
                    return


def _count(candidate: Candidate, tally: UnitCounts, ranges: Ranges) -> bool:
    """Counts a document; whether this round encodes it."""
    split = "validation" if candidate.validation else "train"
    counts = tally.seen.setdefault(candidate.set, {}).setdefault(split, Counter())
    counts["documents"] += 1
    counts["bytes"] += candidate.bytes
    low, high, held_out = ranges.of(candidate.set)
    wanted = held_out if candidate.validation else low <= candidate.place < high
    if wanted:
        tally.encoded += 1
        tally.encoded_bytes += candidate.bytes
        if candidate.set not in tally.sets:
            tally.sets.append(candidate.set)
            if len(tally.sets) > np.iinfo(DOCUMENT["set"]).max:
                raise UserError(
                    f"{len(tally.sets)} different sets in a few files: the set's key seems to "
                    "hold something else (choose with --set-key)"
                )
    return wanted


def chunks(documents: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Groups documents into chunks of bounded size, encoded in one call."""
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
    """The `DOCUMENT` of each document of a chunk."""
    described = np.zeros(len(chunk), DOCUMENT)
    described["place"] = np.array([c.place for c in chunk], dtype=np.uint64)
    described["position"] = [c.position for c in chunk]
    described["length"] = lengths
    described["bytes"] = [c.bytes for c in chunk]
    described["set"] = [sets.index(c.set) for c in chunk]
    described["validation"] = [c.validation for c in chunk]
    return described
