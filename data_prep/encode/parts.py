"""Part files: what one round of encoding made of one unit.

    part-00012.0.bin        the tokens of its documents, one after the other
    part-00012.0.docs       a `DOCUMENT` for each of them, in the same order
    part-00012.0.malformed  a line for each record that was not a document
    part-00012.0.json       the part's record: counts, sizes, checksums; it goes last

A part without its record does not exist. The record carries its own checksum, and the `key` of the
work it belongs to, so that nothing else is ever taken for it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import opened, sha256, sync_directory, write_sealed
from cat_lm.core.readers import Versioned, check_shape, read_object

DOCUMENT = np.dtype(
    [
        ("place", "<u8"),  # the hash of the document's text, see encoding.hash_place
        ("position", "<u4"),  # its number among the unit's documents, those not encoded included
        ("length", "<i4"),  # tokens, EOD included
        ("bytes", "<u4"),  # of its UTF-8 text
        ("set", "<u2"),  # index into the record's `sets`
        ("validation", "u1"),
        ("spare", "u1"),
    ]
)
KINDS = ("bin", "docs", "malformed")


def part_path(work: Path, unit: int, round_number: int, kind: str) -> Path:
    """The file of a part; `kind` is one of `KINDS`, or json for its record."""
    return work / f"part-{unit:05d}.{round_number}.{kind}"


class PartWriter:
    """Writes a part under temporary names; `finish` verifies it and puts it in its place.

    Use as a context manager: without `finish`, nothing remains. The temporary names are unique, so
    that two processes that encode the same unit do not meet; both make the same bytes.
    """

    def __init__(self, work: Path, unit: int, round_number: int) -> None:
        self.work = work
        self.unit = unit
        self.round = round_number

    def __enter__(self) -> PartWriter:
        self._stack = ExitStack()
        self._streams: dict[str, IO[bytes]] = {}
        self._digests = {kind: hashlib.sha256() for kind in KINDS}
        self._sizes = dict.fromkeys(KINDS, 0)
        with ExitStack() as undo, disk_errors(self.work):
            undo.push(self._stack)
            for kind in KINDS:
                name = part_path(self.work, self.unit, self.round, kind).name
                self._streams[kind] = self._stack.enter_context(_temporary(self.work, name))
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, kind: str, data: bytes | memoryview) -> None:
        """Appends to one of the three files."""
        with disk_errors(self.work):
            _write(self._streams[kind], data)
        self._digests[kind].update(data)
        self._sizes[kind] += len(data)

    def finish(self, record: dict) -> dict:
        """Flushes, reads back, renames; the record, completed and written, says it is done."""
        digests = {kind: digest.hexdigest() for kind, digest in self._digests.items()}
        with disk_errors(self.work):
            for kind, stream in self._streams.items():
                stream.flush()
                os.fsync(stream.fileno())
                if sha256(stream.name) != digests[kind]:
                    raise UserError(f"{stream.name}: reads back different; check the disk")
            for kind, stream in self._streams.items():
                os.replace(stream.name, part_path(self.work, self.unit, self.round, kind))
            sync_directory(self.work)
            record = {**record, "bytes": self._sizes, "sha256": digests}
            path = part_path(self.work, self.unit, self.round, "json")
            write_record(path, record)
        return record


def _write(stream: IO[bytes], data: bytes | memoryview) -> None:
    stream.write(data)


@contextmanager
def _temporary(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """A file of a name that no other process uses, removed in the end unless it was renamed."""
    path = folder / f".{name}.{os.uname().nodename}.{os.getpid()}.tmp"
    stream = None
    try:
        stream = open(path, "wb")  # noqa: SIM115 - closed below
        yield stream
    finally:
        if stream is not None:
            with suppress(OSError):  # on a full disk what is still buffered cannot be written
                stream.close()
        path.unlink(missing_ok=True)


def write_record(path: Path, record: dict) -> None:
    """Writes JSON that carries its own checksum."""
    write_sealed(path, {"format": 1, **record})


def read_record(path: Path, keys: Iterable[str]) -> dict | None:
    """Read a record with `keys`; None where none is, a damaged one, or one of another kind.

    Raises:
        UserError: another version wrote it.
    """
    try:
        record, whole = opened(read_object(path))
    except UserError:
        return None
    if not whole:
        return None
    check_shape(record, Versioned, str(path), f"delete {path.parent}")
    del record["format"]
    return record if record.keys() >= set(keys) else None


def finished_part(work: Path, unit: int, round_number: int, key: str) -> dict | None:
    """The record of a part that is done for this key and has files of the right sizes, or None."""
    path = part_path(work, unit, round_number, "json")
    record = read_record(path, ("key", "bytes", "sha256", "sets"))
    if record is None or record["key"] != key:
        return None
    for kind in KINDS:
        path = part_path(work, unit, round_number, kind)
        if not path.is_file() or path.stat().st_size != record["bytes"][kind]:
            return None
    return record


def remove_part(work: Path, unit: int, round_number: int, kinds: tuple[str, ...] = KINDS) -> None:
    """Removes files of a part; the record goes first where the whole part does."""
    if kinds == KINDS:
        part_path(work, unit, round_number, "json").unlink(missing_ok=True)
    for kind in kinds:
        part_path(work, unit, round_number, kind).unlink(missing_ok=True)


def remove_temporary(work: Path, unit: int | None = None) -> None:
    """Removes what killed processes left of a unit, or of all."""
    for file in work.glob(".part-*.tmp" if unit is None else f".part-{unit:05d}.*.tmp"):
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class UnitDocuments:
    """The documents of a unit from all rounds, in the order of the input.

    `documents` (`DOCUMENT`; `set` indexes the names given to `read`), and where the tokens of each
    are: the round, and the position of its first token in that round's .bin.
    """

    documents: np.ndarray
    round: np.ndarray
    start: np.ndarray

    @classmethod
    def read(cls, work: Path, unit: int, records: list[dict], names: list[str]) -> UnitDocuments:
        """Reads the .docs of every round; a few bytes for each document of this unit."""
        indices = {name: index for index, name in enumerate(names)}
        found, rounds, starts = [], [], []
        for number, record in enumerate(records):
            documents = np.fromfile(part_path(work, unit, number, "docs"), DOCUMENT)
            to_global = np.array([indices[name] for name in record["sets"]], dtype="<u2")
            documents["set"] = to_global[documents["set"]] if len(documents) else 0
            ends = np.cumsum(documents["length"], dtype=np.int64)
            found.append(documents)
            rounds.append(np.full(len(documents), number, dtype=np.int32))
            starts.append(ends - documents["length"])
        if len(found) == 1:
            return cls(found[0], rounds[0], starts[0])
        documents = np.concatenate(found)
        order = np.argsort(documents["position"], kind="stable")
        return cls(documents[order], np.concatenate(rounds)[order], np.concatenate(starts)[order])


@dataclass
class Parts:
    """The parts to read: their folder, and the records of each unit's rounds."""

    work: Path
    names: list[str]  # of the sets, in the order that `Selection` and `UnitDocuments` count them
    records: dict[int, list[dict]]
    unit_splits: dict[int, str | None]

    def read(self, unit: int) -> UnitDocuments:
        """The documents of a unit in the order of the input, those of all rounds."""
        return UnitDocuments.read(self.work, unit, self.records[unit], self.names)

    def of(self, units: set[int]) -> Parts:
        """The same for some units only, light enough to be sent to a worker."""
        records = {
            unit: [{"sets": record["sets"], "tokens": record["tokens"]} for record in found]
            for unit, found in self.records.items()
            if unit in units
        }
        return Parts(self.work, self.names, records, {u: self.unit_splits[u] for u in records})


@dataclass(frozen=True)
class PartCheck:
    """A part whose bytes are to be compared with its record's checksums."""

    work: Path
    unit: int
    round: int
    sha256: dict[str, str]


def check_part(task: PartCheck, report: Callable[[int], None]) -> tuple[int, int, bool]:
    """The unit, the round, and whether the part's files are what was written."""
    for kind in KINDS:
        path = part_path(task.work, task.unit, task.round, kind)
        if not path.is_file() or sha256(path) != task.sha256[kind]:
            return task.unit, task.round, False
        report(path.stat().st_size)
    return task.unit, task.round, True


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full disk into one clear line."""
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
