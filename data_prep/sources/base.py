"""A source of documents: parts in a fixed order, and a way to read each.

A part is a file, here or on the Hub; so documents have one order, on every machine and for any
number of workers. Files are in natural order, in which runs of digits count as numbers (chunk2
before chunk10); training text comes before validation text.
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

UNIT_BYTES = 256_000_000  # of input files; some minutes of one core
UNITS_AT_LEAST = 64  # as far as there are files, so that small sources have work for all cores
HASHED_BYTES = 256_000_000  # of a source's files: about a second of hashing
UNKNOWN_SET = "unknown"
NAMED_IN_MANIFEST, NAMED_IN_LOG = 20, 3  # of files that are left out


@dataclass(frozen=True)
class Piece:
    """The characters [start, stop) of the only document of a file of `file_size` bytes."""

    start: int
    stop: int
    file_size: int


@dataclass(frozen=True)
class Part:
    """A piece of a source that is read in one go: a file, with the split it is known to be of.

    `name` is the same on every machine, and for a copy and the Hub. `size` is in bytes; `sha256` is
    there where the Hub lists it. With `piece` the part is that much of the file's only document,
    and `size` counts the bytes of that text. `identity` is equal for all names of one file.
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
        """Return about how many bytes of text there are."""
        rate = 1.0 if self.piece else TEXT_PER_FILE_BYTE.get(suffix_of(self.path), 1.0)
        return int(rate * self.size)


@dataclass(frozen=True)
class LeftOut:
    """Files that a path stands for and that are not read, for the log and the manifest."""

    reason: str
    files: int
    names: tuple[str, ...]  # of the first ones

    @classmethod
    def of(cls, reason: str, names: Sequence[str]) -> list[LeftOut]:
        """Return a list of the one entry that these files are, of none where there are none."""
        shown = tuple(clipped(name, 200) for name in names[:NAMED_IN_MANIFEST])
        return [cls(reason, len(names), shown)] if names else []

    def note(self) -> str:
        """Return the line that the log has of them."""
        more = ["…"] if self.files > NAMED_IN_LOG else []
        names = ", ".join([*self.names[:NAMED_IN_LOG], *more])
        return f"{self.reason} (files: {self.files:,}): {names}"


class Source:
    """Documents in a fixed order. Subclasses set `kind` and `parts` and implement `read`.

    A source can be pickled: its parts may be read in any process, in any order, any number of times
    with equal result.
    """

    kind: str
    reading: Reading | None = None
    parts: list[Part]
    left_out: Sequence[LeftOut] = ()
    # Where files that are not read from beginning to end are copied to, so that they are verified.
    scratch: Path | None = None

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        """Yield the documents of one part, in order, and in their places the lines that hold none.

        Raises:
            UserError: the part cannot be read as a whole.
        """
        raise NotImplementedError

    @property
    def has_validation(self) -> bool:
        """Return True if the source decides the split of every document."""
        return all(part.split for part in self.parts)

    def notes(self, held_out: float) -> list[str]:
        """Return lines for the log on what is left out or, where it is not asked for, held out.

        Args:
            held_out: the share of documents where the source brings no split of its own.
        """
        return [entry.note() for entry in self.left_out]

    def describe(self) -> dict:
        """Describe the source for the manifest; equal for equal input, on every machine.

        Local sources of up to `HASHED_BYTES` are described by the contents of their files too.
        Larger ones only by names and sizes, because reading terabytes to find that nothing is to
        be done takes hours: there, an edit that keeps a file's size is not noticed.

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
    """Make the error of a file or folder that cannot be read."""
    return file_error(f"{path}: cannot be read ({describe_os_error(error)})", error)


def counted_with(split: str | None) -> str:
    """Return the split whose documents a part's count with towards --max-documents and bytes."""
    return "validation" if split == "validation" else "train"


def read_once(parts: Iterable[Part]) -> tuple[list[Part], list[LeftOut]]:
    """Return the parts without those that are one file with an earlier one, and these.

    Raises:
        UserError: a file is held out under one name and trained on under another.
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
    """Return the named set that a record belongs to; `default` where it names none.

    The objects on the way to it may be written out as JSON, as in some parquet mirrors. A name
    that cannot be printed comes with escapes.
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
    """Sort parts by name, runs of digits taken as numbers: chunk1, chunk2, …, chunk10."""

    def key(part: Part) -> tuple[list[str | int], str]:
        pieces = re.split(r"([0-9]+)", part.name)  # text and digits in turn
        return [int(p) if i % 2 else p for i, p in enumerate(pieces)], part.name

    return sorted(parts, key=key)


def in_hash_order(parts: Iterable[Part], seed: int) -> list[Part]:
    """Sort training parts, all but those held out, by a hash of the seed and their names."""
    found = [part for part in parts if part.split != "validation"]
    found.sort(key=lambda part: hashlib.sha256(f"{seed} {part.name}".encode()).digest())
    return found


@dataclass(frozen=True)
class Unit:
    """A piece of the work: consecutive files of one split; `bytes` are theirs on disk.

    The units follow from the names, order and sizes of the files alone. So every process on every
    machine has the same ones, and a unit that one of them has encoded is done for all.
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
        """Return the hash of what the unit consists of."""
        listing = "".join(f"{part.name} {part.size}\n" for part in self.parts)
        return hashlib.sha256(listing.encode()).hexdigest()


def units_of(source: Source) -> list[Unit]:
    """Return the units of a source; no file is cut."""
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
    """Return the units of task I of N: every N-th, beginning with unit I; all of them for None."""
    index, count = task or (0, 1)
    return units[index::count]
