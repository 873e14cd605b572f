"""Keep what takes long to make: arrays in a folder of the cache, mapped into memory when read.

A folder is named by all that decides its arrays, appears whole or not at all, and is made by one
process while others wait. What is generated in pieces keeps its finished pieces, so that a command
which was stopped goes on where it was.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cat_lm.core.errors import UserError, describe_os_error
from cat_lm.core.files import atomic_write, checksums, opened, write_sealed
from cat_lm.core.folders import atomic_folder, hold
from cat_lm.core.readers import Versioned, check_shape, read_object
from cat_lm.data.verified import changed_files
from eval.lab.store import key_hash
from eval.long_range.tasks.base import Place

_RECORD = "record.json"


class Stored(NamedTuple):
    """Attributes: arrays by name, read-only; and where they come from."""

    arrays: dict[str, np.ndarray]
    origin: dict[str, Any]


class _Shape(Versioned):
    """The record of a folder: the dtype and the shape of each array, and the files' SHA-256."""

    key: dict[str, Any]
    origin: dict[str, Any]
    arrays: dict[str, list]
    sha256: dict[str, str]


class Work:
    """A folder in the making, and the place for finished pieces that outlives a stop.

    Attributes:
        parts: a folder for pieces; it goes when all is done.
        workers: processes that may work.
    """

    def __init__(self, folder: Path, parts: Path, workers: int) -> None:
        self.parts, self.workers = parts, workers
        self.shapes: dict[str, list] = {}
        self._folder = folder

    def save(self, name: str, array: np.ndarray) -> None:
        """Keep an array under a name."""
        self.shapes[name] = [str(array.dtype), list(array.shape)]
        np.save(self._folder / f"{name}.npy", array, allow_pickle=False)


def stored(
    place: Place, name: str, key: Mapping[str, Any], make: Callable[[Work], Mapping[str, Any]]
) -> Stored:
    """Return arrays from the cache; made and kept where they are not there yet.

    Args:
        name: begins the folder's name.
        key: plain values, all that decides the arrays.
        make: saves the arrays, and says where they come from.

    Raises:
        UserError: of `make`; or the folder holds something else than was written.
    """
    folder = place.cache / f"{name}-{key_hash(key)}"
    if not (folder / _RECORD).is_file():
        place.cache.mkdir(parents=True, exist_ok=True)
        with hold(place.cache / f".{folder.name}.lock"):
            if not (folder / _RECORD).is_file():
                _make(folder, key, make, place.workers)
    return _read(folder)


def _make(
    folder: Path, key: Mapping[str, Any], make: Callable[[Work], Mapping[str, Any]], workers: int
) -> None:
    parts = folder.with_name(f"{folder.name}.parts")
    with atomic_folder(folder) as place:
        work = Work(place, parts, workers)
        origin = _made(make, work, folder.parent)
        digests = checksums((place / f"{name}.npy" for name in work.shapes), "sha256")
        record = {
            "format": 1, "key": dict(key), "origin": dict(origin), "arrays": work.shapes,
            "sha256": {path.name: digest for path, digest in digests.items()},
        }  # fmt: skip
        write_sealed(place / _RECORD, record)
    shutil.rmtree(parts, ignore_errors=True)


def _made(make: Callable[[Work], Mapping[str, Any]], work: Work, cache: Path) -> Mapping[str, Any]:
    """Call `make`; what it cannot read elsewhere is a UserError that names the file."""
    try:
        return make(work)
    except OSError as error:
        if error.filename is None or Path(error.filename).is_relative_to(cache):
            raise
        raise UserError(f"{error.filename}: {describe_os_error(error)}") from None


def _read(folder: Path) -> Stored:
    advice = f"delete {folder}, and the same command makes it again"
    values, whole = opened(read_object(folder / _RECORD, advice))
    record = check_shape(values, _Shape, str(folder / _RECORD), advice)
    if not whole:
        raise UserError(f"{folder / _RECORD}: was changed after it was written; {advice}")
    arrays = {}
    for name, shape in record.arrays.items():
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):  # missing; or shorter than its own header says
            raise UserError(f"{path}: is missing or damaged; {advice}") from None
        if [str(array.dtype), list(array.shape)] != shape:
            raise UserError(f"{path}: is not the one that was written; {advice}")
        arrays[name] = array
    if changed := list(changed_files(folder, record.sha256)):
        raise UserError(f"{changed[0]}: is not the one that was written; {advice}")
    return Stored(arrays, record.origin)


def in_parts(
    work: Work, make: Callable[[Any], np.ndarray], pieces: Mapping[str, Any], what: str
) -> Iterator[np.ndarray]:
    """Yield the arrays of pieces in their order, each made once and kept until all is done.

    Args:
        make: a function of a module, of a piece's value alone: other processes import it.
        pieces: name -> value.
        what: a word for the progress bar.
    """
    from tqdm import tqdm

    from data_prep.common.workers import run_tasks

    work.parts.mkdir(parents=True, exist_ok=True)
    # Unlike .npy, .npz has checksums of its arrays (CRC-32), which are compared at reading.
    paths = {name: work.parts / f"{name}.npz" for name in pieces}
    missing = [(make, pieces[name], path) for name, path in paths.items() if not path.is_file()]
    bar = tqdm(total=len(pieces), initial=len(pieces) - len(missing), desc=what, disable=None)
    with bar:
        workers = max(1, min(work.workers, len(missing)))
        for _ in run_tasks(_make_part, missing, workers, lambda done: None):
            bar.update(1)
    for path in paths.values():
        try:
            with np.load(path, allow_pickle=False) as piece:
                array = piece["arr_0"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            raise UserError(
                f"{path}: is missing or damaged; delete {work.parts}, and the same command makes "
                "it again"
            ) from None
        yield array


def _make_part(
    task: tuple[Callable[[Any], np.ndarray], Any, Path], report: Callable[[int], None]
) -> None:
    make, value, path = task
    with atomic_write(path, "wb") as stream:
        np.savez(stream, make(value))
