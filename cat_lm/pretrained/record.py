"""`export.json`: where an exported model came from, and which files were written with what in them.

The listing proves which files of a folder are an export's own, to be replaced by the next one, and
that they still are what was written: whatever loads a model compares the files that it reads. The
model card is for people and may be edited. A folder without such a record is no export of ours and
loads as it is; a record of another version is refused.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import Algorithm, checksums
from cat_lm.core.numbers import CONTEXT
from cat_lm.core.readers import InsideName, Record, Versioned, check_shape, read_object

RECORD = "export.json"
PROGRAM = "cat_lm.export"
CARD = "README.md"
WEIGHTS = "model.safetensors"

_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_LISTS = {"files", "sha256"}
_AGAIN = "export the model again"


class ListedFile(Record):
    """A file as it was written: SHA-256 for others to compare, XXH3, much faster, for us."""

    bytes: int = Field(ge=0)
    sha256: _Sha256
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class ExportRecord(Versioned):
    """Hold what `cat_lm.export` writes of weights that it found finite.

    `sha256` is that of model.safetensors.
    """

    program: Literal["cat_lm.export"]
    files: dict[InsideName, ListedFile]
    dtype: str
    parameters: int = Field(ge=0)
    sha256: _Sha256
    step: int | None = None
    tokens: int | None = None
    data_fingerprint: str | None = None
    code: dict[str, Any] | None = None
    context_length: int | None = Field(None, ge=CONTEXT.low, le=CONTEXT.high)
    context_method: str | None = None
    context_factor: float | None = None
    precision: Literal["bf16", "fp32"] | None = None  # of the training


def read_record(folder: Path) -> ExportRecord | None:
    """Read what an export says of itself; None where `folder` is none.

    Raises:
        UserError: export.json is there and damaged, or of another version.
    """
    if not (folder / RECORD).is_file():
        return None
    values = read_object(folder / RECORD, _AGAIN)
    # Another program's file may have this name. One that lists files as ours do is ours, damaged.
    if values.get("program") != PROGRAM and not values.keys() >= _LISTS:
        return None
    record = check_shape(values, ExportRecord, str(folder / RECORD), _AGAIN)
    for name in ("config.json", WEIGHTS):
        if name not in record.files:
            raise UserError(f"{folder / RECORD}: files has no {name}; {_AGAIN}")
    return record


def recorded_context_length(folder: Path) -> int | None:
    """Read the context length of the training; None where the record does not say."""
    record = read_record(folder)
    return None if record is None else record.context_length


def recorded_precision(folder: Path) -> str | None:
    """Read what the training computed in, bf16 or fp32; None where the record does not say."""
    record = read_record(folder)
    return None if record is None else record.precision


def listing(folder: Path) -> list[str]:
    """Name the files that an export wrote, its record last; none where it is no export."""
    record = read_record(folder)
    return [] if record is None else [*record.files, RECORD]


def describe_files(folder: Path, names: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """List files of a folder (all, or `names`) for its record: name to size and checksums."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = [folder / name for name in names] or paths
    sha256, xxh3 = checksums(paths, "sha256"), checksums(paths, "xxh3_128")
    return {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "sha256": sha256[path],
            "xxh3_128": xxh3[path],
        }
        for path in paths
    }


def changed_files(folder: Path) -> list[str]:
    """Name the listed files of an export that are there and are no longer what was written."""
    record = read_record(folder)
    files = {} if record is None else record.files
    there = {name: folder / name for name in files if (folder / name).is_file()}
    found = digests(there.values(), "xxh3_128")
    return [name for name, path in there.items() if found[path] != files[name].xxh3_128]


# Comparing

_skipped: contextvars.ContextVar[bool] = contextvars.ContextVar("skipped", default=False)
# Checksums by what tells that a file is still the one that was hashed.
_known: dict[tuple, str] = {}


@contextmanager
def comparing_files(skip: bool = False) -> Iterator[None]:
    """Within, models are loaded without a comparison of their files, where `skip` says so."""
    token = _skipped.set(skip)
    try:
        yield
    finally:
        _skipped.reset(token)


def digests(paths: Iterable[Path], algorithm: Algorithm) -> dict[Path, str]:
    """Hash files in threads; in one process each is read once, however often it is asked for."""
    identities = {path: (algorithm, *_identity(path)) for path in paths}
    unknown = [path for path, identity in identities.items() if identity not in _known]
    for path, digest in checksums(unknown, algorithm).items():
        _known[identities[path]] = digest
    return {path: _known[identity] for path, identity in identities.items()}


def _identity(path: Path) -> tuple:
    found = path.stat()
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def verify(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Compare the listed files of an export with its record, as far as their names are `wanted`.

    Raises:
        UserError: one is missing or is not what was written.
    """
    if _skipped.get():
        return
    record = read_record(folder)
    files = {} if record is None else record.files
    listed = {folder / name: file for name, file in files.items() if wanted(name)}
    for path, file in listed.items():
        if _size(path) != file.bytes:
            raise _changed(path, f"has {_size(path):,} bytes", f"{file.bytes:,}")
    for path, digest in digests(listed, "xxh3_128").items():
        expected = listed[path].xxh3_128
        if digest != expected:
            found = f"has the XXH3 checksum {digest[:16]}…"
            raise _changed(path, found, f"{expected[:16]}…")


def finite_as_listed(folder: Path, files: Iterable[Path]) -> str | None:
    """Describe in which dtype an export's weights were found finite before they were hashed.

    `verify` compares these hashes: while it does, or has, the numbers are those that were found so.

    Args:
        files: of the weights that are read.

    Returns:
        The dtype's name; None where `verify` compares nothing.
    """
    record = None if _skipped.get() else read_record(folder)
    if record is None:
        return None
    listed = all(str(file.relative_to(folder)) in record.files for file in files)
    return record.dtype if listed else None


@contextmanager
def verifying(folder: Path, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Run `verify` in a thread meanwhile; what it finds comes before an error of the block."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(contextvars.copy_context().run, verify, folder, wanted)
        try:
            yield
        except UserError:
            done.result()
            raise
        done.result()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: is missing, {RECORD} lists it; {_AGAIN}") from None
    except OSError as error:
        raise file_error(f"{path}: {describe_os_error(error)}", error) from None


def _changed(path: Path, found: str, expected: str) -> UserError:
    return UserError(
        f"{path}: {found}, {RECORD} lists {expected}: it was damaged or changed; {_AGAIN}, or, if "
        f"the change is meant, remove {RECORD} (or give "
        "--skip-checksums, in training train.init_checksums=false)"
    )
