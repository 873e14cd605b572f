"""Part files, which hold the encoded documents of one unit.

    part-00012.bin        the tokens of the documents, concatenated
    part-00012.docs       a `DOCUMENT` for each document, in the same order
    part-00012.malformed  a line for each record without a valid document
    part-00012.json       a `PartRecord` with counts, sizes and checksums, written last

A part without a record does not count. The record has its own checksum, and the `key` of the
settings with which the part was made, so that parts of other settings are not used.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write, sha256, unseal, write_sealed
from cat_lm.core.readers import Versioned, check_shape, read_object

DOCUMENT = np.dtype(
    [
        ("place", "<u8"),  # the hash place, see encoding.hash_place
        ("position", "<u4"),  # index among all documents of the unit
        ("length", "<i4"),  # number of tokens, EOD included
        ("bytes", "<u4"),  # size of the UTF-8 text
        ("set", "<u2"),  # index into the record's `sets`
        ("validation", "u1"),
        ("spare", "u1"),
    ]
)
T = TypeVar("T")
KINDS = ("bin", "docs", "malformed")


@dataclass
class PartRecord:
    """The counts of all documents of a unit, and the sizes and SHA-256 of its part's files."""

    key: str
    text_bytes: int = 0
    found: int = 0  # documents with text, of any set
    documents: int = 0  # encoded documents
    encoded_bytes: int = 0
    empty: int = 0
    malformed: int = 0
    first_malformed: str | None = None
    tokens: int = 0
    sets: list[str] = field(default_factory=list)
    seen: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)


def part_path(work: Path, unit: int, kind: str) -> Path:
    """Return the file of a part; `kind` is one of `KINDS`, or json for its record."""
    return work / f"part-{unit:05d}.{kind}"


@contextmanager
def new_part(work: Path, unit: int) -> Iterator[dict[str, IO[bytes]]]:
    """Yield the three open files of a part, which are renamed into place if the block succeeds.

    Two processes may make the same part, because both write the same bytes.
    """
    with ExitStack() as stack:
        paths = {kind: part_path(work, unit, kind) for kind in KINDS}
        yield {k: stack.enter_context(atomic_write(path, "wb")) for k, path in paths.items()}


def finish_part(work: Path, unit: int, record: PartRecord) -> PartRecord:
    """Hash the files of a part, and write the record that marks it as finished."""
    for kind in KINDS:
        path = part_path(work, unit, kind)
        record.bytes[kind], record.sha256[kind] = path.stat().st_size, sha256(path)
    write_record(part_path(work, unit, "json"), record)
    return record


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON with a checksum of itself."""
    write_sealed(path, {"format": 1, **asdict(record)})


def load_record(path: Path, kind: type[T]) -> T | None:
    """Return a record as a dataclass; None if it is missing, damaged, or of another class.

    Raises:
        UserError: another version wrote it.
    """
    try:
        record, whole = unseal(read_object(path))
    except UserError:
        return None
    if not whole:
        return None
    check_shape(record, Versioned, str(path), f"delete {path.parent}")
    try:
        return TypeAdapter(kind).validate_python(record)
    except ValidationError:
        return None


def finished_part(work: Path, unit: int, key: str) -> PartRecord | None:
    """Return the record of a finished part with this key and files of the right sizes, or None."""
    record = load_record(part_path(work, unit, "json"), PartRecord)
    if record is None or record.key != key:
        return None
    paths = {part_path(work, unit, kind): size for kind, size in record.bytes.items()}
    whole = all(path.is_file() and path.stat().st_size == size for path, size in paths.items())
    return record if whole else None


def remove_part(work: Path, unit: int, kinds: Iterable[str] = ("json", *KINDS)) -> None:
    """Remove files of a part, by default all, beginning with the record."""
    for kind in kinds:
        part_path(work, unit, kind).unlink(missing_ok=True)


@dataclass
class Parts:
    """A reader of parts, with the sets, tokens and splits of their units."""

    work: Path
    names: list[str]  # set names in the order of `Selection`
    sets: dict[int, list[str]]
    tokens: dict[int, int]
    unit_splits: dict[int, str | None]

    def read(self, unit: int) -> np.ndarray:
        """Return the `DOCUMENT`s of a unit in input order, with set indices into `names`."""
        documents = np.fromfile(part_path(self.work, unit, "docs"), DOCUMENT)
        own = [self.names.index(name) for name in self.sets[unit]]
        if own:
            documents["set"] = np.array(own, dtype="<u2")[documents["set"]]
        return documents

    def scan(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (unit number, its documents) for all units in order."""
        return ((unit, self.read(unit)) for unit in sorted(self.sets))

    def of(self, units: set[int]) -> Parts:
        """Return a reader of some units only, which is small enough to send to a worker."""
        of_units = (self.sets, self.tokens, self.unit_splits)
        return Parts(self.work, self.names, *({u: own[u] for u in units} for own in of_units))


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Replace the error of a full disk by a UserError with the free space."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        reason = "the disk is full"
        if error.errno == errno.EFBIG:
            reason = "files may not grow further here (ulimit -f)"
        with suppress(OSError):
            reason += f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB free)"
        raise UserError(
            f"{folder}: {reason}; make room and run the same command again: it continues"
        ) from None
