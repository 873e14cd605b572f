"""Part files: what the encoding made of one unit.

    part-00012.bin        the tokens of its documents, one after the other
    part-00012.docs       a `DOCUMENT` for each of them, in the same order
    part-00012.malformed  a line for each record that was not a document
    part-00012.json       the part's record: counts, sizes, checksums; it goes last

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
from typing import IO, TypeVar

import numpy as np
from pydantic import TypeAdapter

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
T = TypeVar("T")
KINDS = ("bin", "docs", "malformed")


def part_path(work: Path, unit: int, kind: str) -> Path:
    """Return the file of a part; `kind` is one of `KINDS`, or json for its record."""
    return work / f"part-{unit:05d}.{kind}"


class PartWriter:
    """Writes a part under temporary names; `finish` puts it in its place.

    Use as a context manager: without `finish`, nothing remains. The temporary names are unique, so
    that two processes that encode the same unit do not meet; both make the same bytes.
    """

    def __init__(self, work: Path, unit: int) -> None:
        self.work = work
        self.unit = unit

    def __enter__(self) -> PartWriter:
        self._stack = ExitStack()
        self._streams: dict[str, IO[bytes]] = {}
        self._digests = {kind: hashlib.sha256() for kind in KINDS}
        self._sizes = dict.fromkeys(KINDS, 0)
        with ExitStack() as undo, disk_errors(self.work):
            undo.push(self._stack)
            for kind in KINDS:
                path = part_path(self.work, self.unit, kind)
                self._streams[kind] = self._stack.enter_context(_temporary(path))
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, kind: str, data: bytes | memoryview) -> None:
        """Append to one of the three files."""
        with disk_errors(self.work):
            _write(self._streams[kind], data)
        self._digests[kind].update(data)
        self._sizes[kind] += len(data)

    def finish(self, record: dict) -> dict:
        """Flush and rename the files; the record, completed and written, says that it is done."""
        digests = {kind: digest.hexdigest() for kind, digest in self._digests.items()}
        with disk_errors(self.work):
            for stream in self._streams.values():
                stream.flush()
                os.fsync(stream.fileno())
            for kind, stream in self._streams.items():
                os.replace(stream.name, part_path(self.work, self.unit, kind))
            sync_directory(self.work)
            record = {**record, "bytes": self._sizes, "sha256": digests}
            write_record(part_path(self.work, self.unit, "json"), record)
        return record


def _write(stream: IO[bytes], data: bytes | memoryview) -> None:
    stream.write(data)


@contextmanager
def _temporary(path: Path) -> Iterator[IO[bytes]]:
    path = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
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
    """Write JSON that carries its own checksum."""
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


def load_record(path: Path, kind: type[T]) -> T | None:
    """Read a record of a dataclass; None as in `read_record`."""
    record = read_record(path, kind.__dataclass_fields__)
    return None if record is None else TypeAdapter(kind).validate_python(record)


def finished_part(work: Path, unit: int, key: str) -> dict | None:
    """Return the record of a part that is done for this key and has files of its sizes, or None."""
    record = read_record(part_path(work, unit, "json"), ("key", "bytes", "sha256", "sets"))
    if record is None or record["key"] != key:
        return None
    for kind in KINDS:
        path = part_path(work, unit, kind)
        if not path.is_file() or path.stat().st_size != record["bytes"][kind]:
            return None
    return record


def remove_part(work: Path, unit: int, kinds: Iterable[str] = ("json", *KINDS)) -> None:
    """Remove files of a part; its record goes first where the whole part does."""
    for kind in kinds:
        part_path(work, unit, kind).unlink(missing_ok=True)


@dataclass
class Parts:
    """The parts to read: their folder, and the records and the splits of their units."""

    work: Path
    names: list[str]  # of the sets, in the order in which `Selection` counts them
    records: dict[int, dict]
    unit_splits: dict[int, str | None]

    def read(self, unit: int) -> np.ndarray:
        """Read the documents of a unit in the order of the input: `DOCUMENT`, sets by `names`."""
        documents = np.fromfile(part_path(self.work, unit, "docs"), DOCUMENT)
        own = [self.names.index(name) for name in self.records[unit]["sets"]]
        if own:
            documents["set"] = np.array(own, dtype="<u2")[documents["set"]]
        return documents

    def scan(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the documents of all units, each with its unit's number, in order."""
        return ((unit, self.read(unit)) for unit in sorted(self.records))

    def of(self, units: set[int]) -> Parts:
        """Return the same for some units only, light enough to be sent to a worker."""
        records = {
            unit: {key: self.records[unit][key] for key in ("sets", "tokens")} for unit in units
        }
        return Parts(self.work, self.names, records, {u: self.unit_splits[u] for u in units})


def check_part(
    task: tuple[Path, int, dict[str, str]], report: Callable[[int], None]
) -> tuple[int, bool]:
    """Return a unit's number, and whether the files of its part have these checksums."""
    work, unit, digests = task
    for kind in KINDS:
        path = part_path(work, unit, kind)
        if not path.is_file() or sha256(path) != digests[kind]:
            return unit, False
        report(path.stat().st_size)
    return unit, True


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk into one clear line."""
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
