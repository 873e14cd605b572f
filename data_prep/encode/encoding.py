"""One unit of input files to one part: reading, hashing, splitting, choosing, tokens."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo
from data_prep.encode.parts import DOCUMENT, PartWriter, finished_part
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

    def held_out_below(self, source: Source) -> int:
        """Return the place below which all is held out, 0 where the source says what is."""
        return 0 if source.has_validation else int(self.validation_fraction * PLACES)

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
    dtype: str
    rules: Rules
    coverage: Coverage

    def key(self, unit: Unit) -> str:
        """Return the identity of a part: everything that decides its bytes."""
        decides = {
            "source": self.source.kind,
            "reading": asdict(self.source.reading) if hasattr(self.source, "reading") else None,
            "tokenizer": [self.tokenizer.sha256, self.tokenizer.eod_id, self.dtype],
            "rules": asdict(self.rules),
            "unit": [unit.number, unit.split, unit.listing_sha256],
            "coverage": asdict(self.coverage),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
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
    found: int = 0  # documents with text, of any set: the number of the next one
    documents: int = 0  # encoded
    encoded_bytes: int = 0
    empty: int = 0
    malformed: int = 0
    first_malformed: str | None = None
    tokens: int = 0
    sets: list[str] = field(default_factory=list)
    seen: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)


def encode_unit(task: tuple[Encoding, Unit], report: Callable[[int], None]) -> tuple[int, dict]:
    """Make the part of a unit unless it is there already; return the unit's number and its record.

    `report` is called with bytes of text now and then.
    """
    encoding, unit = task
    key = encoding.key(unit)
    done = finished_part(encoding.work, unit.number, key)
    if done is not None:  # another process has made it meanwhile
        report(done["text_bytes"])
        return unit.number, done
    encoder = _encoder(
        encoding.tokenizer_folder, encoding.tokenizer.eod_id, encoding.tokenizer.vocab_size
    )
    dtype = np.dtype(encoding.dtype).newbyteorder("<")
    with PartWriter(encoding.work, unit.number) as writer:
        tally, reported = UnitCounts(), 0
        for chunk in chunks(_candidates(encoding, unit, tally, writer)):
            tokens, lengths = encoder.encode_documents([c.text for c in chunk], dtype)
            writer.write("bin", np.ascontiguousarray(tokens, dtype).tobytes())
            writer.write("docs", _describe(chunk, lengths, tally.sets).tobytes())
            tally.tokens += len(tokens)
            report(tally.text_bytes - reported)
            reported = tally.text_bytes
        report(tally.text_bytes - reported)
        return unit.number, writer.finish({"key": key, **asdict(tally)})


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, eod_id: int, vocab_size: int) -> DocumentEncoder:
    return DocumentEncoder(folder, eod_id, vocab_size)


def _candidates(
    encoding: Encoding, unit: Unit, tally: UnitCounts, writer: PartWriter
) -> Iterator[Candidate]:
    """Yield the documents of a unit that are to be encoded; everything else is counted."""
    rules = encoding.rules
    held_out_below = 0 if unit.split else rules.validation_fraction
    for item in (item for part in unit.parts for item in encoding.source.read(part)):
        if isinstance(item, Malformed):
            tally.malformed += 1
            # Keys that are quoted may hold what UTF-8 cannot.
            line = f"{item.where}: {item.reason}".encode("utf-8", "backslashreplace")
            tally.first_malformed = tally.first_malformed or line.decode()
            writer.write("malformed", line + b"\n")
            continue
        if not item.text:
            tally.empty += 1
            continue
        text = item.text.encode()
        place = hash_place(text, rules.seed)
        validation = unit.split == "validation" or place / PLACES < held_out_below
        candidate = Candidate(item.text, item.set, len(text), place, tally.found, validation)
        if _count(candidate, tally, encoding.coverage):
            yield candidate
            if rules.limit_reached(unit.split, tally.documents, tally.encoded_bytes):
                return


def _count(candidate: Candidate, tally: UnitCounts, coverage: Coverage) -> bool:
    split = "validation" if candidate.validation else "train"
    by_split = tally.seen.setdefault(candidate.set, {})
    counts = by_split.setdefault(split, {"documents": 0, "bytes": 0})
    counts["documents"] += 1
    counts["bytes"] += candidate.bytes
    tally.text_bytes += candidate.bytes
    tally.found += 1
    below, held_out = coverage.of(candidate.set)
    wanted = held_out if candidate.validation else candidate.place < below
    if wanted:
        tally.documents += 1
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
    described = np.zeros(len(chunk), DOCUMENT)
    described["place"] = np.array([c.place for c in chunk], dtype=np.uint64)
    for name in ("position", "bytes", "validation"):
        described[name] = [getattr(c, name) for c in chunk]
    described["length"] = lengths
    described["set"] = [sets.index(c.set) for c in chunk]
    return described
