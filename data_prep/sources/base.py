"""The base class of sources of documents, which have parts in a fixed order.

A part is a file, local or on the Hub. Documents therefore have the same order on every machine and
for any number of workers. Files are in natural order, in which runs of digits count as numbers
(chunk2 before chunk10); training text comes before validation text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import sha256
from cat_lm.core.readers import clipped
from data_prep.sources.documents import TEXT_PER_FILE_BYTE, Document, Malformed, Reading, suffix_of

UNIT_BYTES = 256_000_000  # input of a unit of work: a few minutes on one core
# Number of units, if there are as many files, so that small sources occupy all cores.
UNITS_AT_LEAST = 64
HASHED_BYTES = 256_000_000  # Up to this size, which takes about a second, sources are hashed.
UNKNOWN_SET = "unknown"
NAMED_IN_MANIFEST, NAMED_IN_LOG = 20, 3  # numbers of left-out files whose names are given


@dataclass(frozen=True)
class Piece:
    """The characters [start, stop) of the only document of a file of `file_size` bytes."""

    start: int
    stop: int
    file_size: int


@dataclass(frozen=True)
class Part:
    """A file of a source, or a piece of it, with its split if the source decides it.

    Attributes:
        path: a local path, or an address on the Hub.
        name: the name within the source, equal on every machine, and for a copy and the Hub.
        split: train, validation, or None for an undecided split.
        size: bytes of the file, or of the text of `piece`.
        sha256: the checksum if the Hub lists it.
        piece: the range of the file's only document that this part has; None for all of it.
        identity: equal for all names of one file.
    """

    path: Path | str
    name: str
    split: str | None = None
    size: int = 0
    sha256: str | None = None
    piece: Piece | None = None
    identity: Hashable = None

    @property
    def text_bytes(self) -> int:
        """Return the estimated bytes of text."""
        rate = 1.0 if self.piece else TEXT_PER_FILE_BYTE.get(suffix_of(self.path), 1.0)
        return int(rate * self.size)


@dataclass(frozen=True)
class LeftOut:
    """Files that a path includes but that are not read, for the log and the manifest."""

    reason: str
    files: int
    names: tuple[str, ...]  # the first names

    @classmethod
    def of(cls, reason: str, names: Sequence[str]) -> list[LeftOut]:
        """Return a list with one entry for these files, or an empty list without files."""
        shown = tuple(clipped(name, 200) for name in names[:NAMED_IN_MANIFEST])
        return [cls(reason, len(names), shown)] if names else []

    def note(self) -> str:
        """Return the line for the log."""
        more = ["…"] if self.files > NAMED_IN_LOG else []
        names = ", ".join([*self.names[:NAMED_IN_LOG], *more])
        return f"{self.reason} (files: {self.files:,}): {names}"


class Source:
    """A source of documents in a fixed order. Subclasses set `kind` and `parts`, and have `read`.

    A source can be pickled. Its parts can be read in any process, in any order, and repeatedly with
    equal results.
    """

    kind: str
    reading: Reading | None = None
    parts: list[Part]
    left_out: Sequence[LeftOut] = ()
    # A folder for copies of files that are not read sequentially, and can only be verified so.
    scratch: Path | None = None

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        """Yield the documents of a part in order, and `Malformed` for records without one.

        Raises:
            UserError: the part cannot be read.
        """
        raise NotImplementedError

    @property
    def has_validation(self) -> bool:
        """Return True if the source decides the split of every document."""
        return all(part.split for part in self.parts)

    def notes(self, held_out: float) -> list[str]:
        """Return lines for the log about files that are left out and about the validation split.

        Args:
            held_out: the validation fraction, for sources without a validation split.
        """
        return [entry.note() for entry in self.left_out]

    def describe(self) -> dict:
        """Return the manifest's description of the source, which is equal for equal input.

        Local sources of up to `HASHED_BYTES` include a hash of their contents. Larger ones have
        only names and sizes, because hashing terabytes takes hours: an edit that keeps the size of
        a file is not noticed.

        Raises:
            UserError: a file cannot be read.
        """
        listing = "".join(
            " ".join(filter(None, (part.name, str(part.size), part.sha256))) + "\n"
            for part in self.parts
        )
        size = sum(part.size for part in self.parts)
        description = {
            "kind": self.kind,
            "files": len({part.path for part in self.parts}),
            "file_bytes": size,
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }
        local = all(isinstance(part.path, Path) for part in self.parts)
        if local and size <= HASHED_BYTES:
            contents = hashlib.sha256()
            for part in self.parts:
                try:
                    contents.update(bytes.fromhex(sha256(part.path)))
                except OSError as error:
                    raise unreadable(part.path, error) from None
            description["contents_sha256"] = contents.hexdigest()
        return description


def unreadable(path: Path | str, error: OSError) -> UserError:
    """Return the error for a file or folder that cannot be read."""
    return file_error(f"{path}: cannot be read ({describe_os_error(error)})", error)


def counted_with(split: str | None) -> str:
    """Return the split under whose --max-documents and --max-bytes a part counts."""
    return "validation" if split == "validation" else "train"


def read_once(parts: Iterable[Part]) -> tuple[list[Part], list[LeftOut]]:
    """Return (the parts without repeated files, entries about the repeated ones).

    Raises:
        UserError: a file is validation text under one name and training text under another.
    """
    first: dict[Hashable, Part] = {}
    repeated = []
    for part in parts:
        same = first.setdefault(part.identity, part)
        if same.split != part.split:
            raise UserError(
                f"{part.path}: is the same file as {same.path}, of another split; what is held out "
                "must not be trained on"
            )
        if same is not part:
            repeated.append(f"{part.name} is {same.name}")
    return list(first.values()), LeftOut.of("read once though listed again", repeated)


def set_name(record: dict, reading: Reading, default: str = UNKNOWN_SET) -> str:
    """Return the set that a record names, or `default`.

    Nested objects may be JSON text, as in some parquet mirrors. Unprintable names are escaped.
    """
    value: object = record
    for key in reading.set_key.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return default
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value:
        return default
    return value if value.isprintable() else value.encode("unicode_escape").decode()


def in_natural_order(parts: Iterable[Part]) -> list[Part]:
    """Return parts sorted by name, with digits as numbers: chunk1, chunk2, …, chunk10."""

    def key(part: Part) -> tuple[list[str | int], str]:
        pieces = re.split(r"([0-9]+)", part.name)  # Text and digits alternate.
        return [int(p) if i % 2 else p for i, p in enumerate(pieces)], part.name

    return sorted(parts, key=key)


def in_hash_order(parts: Iterable[Part], seed: int) -> list[Part]:
    """Return all parts but validation ones, sorted by a hash of the seed and the name."""
    found = [part for part in parts if part.split != "validation"]
    found.sort(key=lambda part: hashlib.sha256(f"{seed} {part.name}".encode()).digest())
    return found


@dataclass(frozen=True)
class Unit:
    """A unit of work: consecutive files of one split; `bytes` is their size on disk.

    Units depend only on the names, order and sizes of the files. Every process on every machine has
    the same ones, so that a unit that one process has encoded is done for all.
    """

    number: int
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def split(self) -> str | None:
        return self.parts[0].split

    @property
    def listing_sha256(self) -> str:
        """Return a hash of the names and sizes of the unit's files."""
        listing = "".join(f"{part.name} {part.size}\n" for part in self.parts)
        return hashlib.sha256(listing.encode()).hexdigest()


def units_of(source: Source) -> list[Unit]:
    """Return the units of a source; a file is never divided among units."""
    target = min(UNIT_BYTES, sum(part.size for part in source.parts) // UNITS_AT_LEAST)
    groups: list[list[Part]] = []
    size = 0
    for part in source.parts:
        same_split = groups and part.split == groups[-1][0].split
        if same_split and part.size and size and size + part.size <= target:
            groups[-1].append(part)
            size += part.size
        else:
            groups.append([part])
            size = part.size
    return [Unit(number, tuple(parts)) for number, parts in enumerate(groups)]


def task_units(units: list[Unit], task: tuple[int, int] | None) -> list[Unit]:
    """Return the units of task I of N (every N-th from unit I on), or all for None."""
    index, count = task or (0, 1)
    return units[index::count]
