"""`export.json`: where an exported model came from, and which files were written with what in them.

The next export replaces the listed files and no others, and whatever loads a model compares the
files that it reads with the listing. The model card is for people and may be edited. A folder
without such a record is no export of ours and loads as it is; a record of another version is
refused.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from cat_lm.core.errors import UserError
from cat_lm.core.files import Algorithm, checksum
from cat_lm.core.numbers import CONTEXT
from cat_lm.core.readers import InsideName, Record, Versioned, check_shape, read_object

RECORD = "export.json"
PROGRAM = "cat_lm.export"
CARD = "README.md"
WEIGHTS = "model.safetensors"

_AGAIN = "export the model again"


class ListedFile(Record):
    """A file as it was written: SHA-256 for others to compare, XXH3, much faster, for us."""

    bytes: int = Field(ge=0)
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class ExportRecord(Versioned):
    """The schema of the keys of export.json that are read."""

    program: Literal["cat_lm.export"]
    files: dict[InsideName, ListedFile] = Field(min_length=1)
    dtype: str
    parameters: int = Field(ge=0)
    context_length: int | None = Field(None, ge=CONTEXT.low, le=CONTEXT.high)
    precision: Literal["bf16", "fp32"] | None = None  # precision of the training


def read_record(folder: Path) -> ExportRecord | None:
    """Read what an export says of itself; None where `folder` is none.

    Raises UserError where export.json is damaged, or of another version.
    """
    if not (folder / RECORD).is_file():
        return None
    values = read_object(folder / RECORD, _AGAIN)
    if values.get("program") != PROGRAM:  # It is another program's file with this name.
        return None
    return check_shape(values, ExportRecord, str(folder / RECORD), _AGAIN)


def listing(folder: Path) -> list[str]:
    """Return the files that an export wrote, its record last; [] for other folders."""
    record = read_record(folder)
    return [] if record is None else [*record.files, RECORD]


def describe_file(path: Path) -> dict[str, Any]:
    """Describe a file for its export's record: size and checksums."""
    sums = {name: checksum(path, name) for name in ("sha256", "xxh3_128")}
    return {"bytes": path.stat().st_size, **sums}


def changed_files(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[Path, str]]:
    """Yield the listed files with `wanted` names that have changed since the export, and how."""
    record = read_record(folder)
    for name, file in ({} if record is None else record.files).items():
        if not wanted(name):
            continue
        path = folder / name
        if not path.is_file():
            yield path, f"is missing, {RECORD} lists it"
        elif (size := path.stat().st_size) != file.bytes:
            yield path, f"has {size:,} bytes, {RECORD} lists {file.bytes:,}"
        elif (digest := digests([path], "xxh3_128")[path]) != (expected := file.xxh3_128):
            yield path, f"has the XXH3 checksum {digest[:16]}…, {RECORD} lists {expected[:16]}…"


_skipped: contextvars.ContextVar[bool] = contextvars.ContextVar("skipped", default=False)


@contextmanager
def comparing_files(skip: bool = False) -> Iterator[None]:
    """Load models in the context without comparing their files with the record, if `skip`."""
    token = _skipped.set(skip)
    try:
        yield
    finally:
        _skipped.reset(token)


def verify(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Compare the listed files of an export, of `wanted` names, with its record.

    Raises UserError where one is missing or is not what was written.
    """
    if _skipped.get():
        return
    for path, problem in changed_files(folder, wanted):
        raise UserError(
            f"{path}: {problem}: it was damaged or changed; {_AGAIN}, or, if the change is meant, "
            f"remove {RECORD} (or give --skip-checksums, in training train.init_checksums=false)"
        )


def digests(paths: Iterable[Path], algorithm: Algorithm) -> dict[Path, str]:
    """Hash files; in one process each is read once, however often it is asked for."""
    found = {}
    for path in paths:
        status = path.stat()
        identity = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        found[path] = _checksum(path, algorithm, identity)
    return found


@cache
def _checksum(path: Path, algorithm: Algorithm, identity: tuple[int, ...]) -> str:
    return checksum(path, algorithm)
