"""Tasks whose rows take long to make: made once, kept in the cache, mapped into memory when read.

A folder of the cache is named by all that decides its arrays, appears whole or not at all, and is
made by one process while others wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import checksums, unseal, write_sealed
from cat_lm.core.folders import atomic_folder, take_lock
from cat_lm.core.readers import Versioned, check_shape, read_object
from cat_lm.data.verified import changed_files
from eval.lab.store import key_hash
from eval.long_range.tasks.base import PAD, Examples, Place, Task
from eval.long_range.tasks.sources import Source

# Of each split a byte for each id of a row less one (0 is padding's), of several towers one after
# the other, and labels, which are read after all rows; and what an origin says of them.
Made = tuple[Mapping[str, tuple[Iterable[bytes], Iterable[int]]], dict[str, Any]]
HELD_OUT = 0.1  # fraction of the training rows for validation
_RECORD = "record.json"


class _Record(Versioned):
    key: dict[str, Any]
    origin: dict[str, Any]
    sha256: dict[str, str]


@dataclass(frozen=True)
class StoredTask(Task):
    """The base of tasks that are kept in the cache.

    Attributes:
        kept_as: begins the folder's name, where several tasks have the same data.
        source: where official files are had.
    """

    kept_as: ClassVar[str] = ""
    source: ClassVar[Source]

    def key(self, place: Place) -> dict[str, Any]:
        """Return plain values, all that decides the rows."""
        return {**self.describe(), **self.source.key(place.folder)}

    def make(self, place: Place) -> Made:
        """Read or generate the rows of all splits. Raises UserError for wrong files."""
        raise NotImplementedError

    def load(self, split: str, place: Place | None = None) -> Examples:
        place = place or Place()
        name, key = self.kept_as or self.name, self.key(place)
        folder = place.cache / f"{name}-{key_hash(key)}"
        if not (folder / _RECORD).is_file():
            place.cache.mkdir(parents=True, exist_ok=True)
            with take_lock(place.cache / f".{folder.name}.lock"):
                if not (folder / _RECORD).is_file():
                    _write(folder, key, *self.make(place))
        record, origin = folder / _RECORD, _checked(folder)
        arrays = (np.load(record.with_name(_file(split, x)), mmap_mode="r") for x in _ARRAYS)
        return self.examples(*arrays, origin)

    def examples(
        self, ids: np.ndarray, ends: np.ndarray, labels: np.ndarray, origin: dict[str, Any]
    ) -> Examples:
        """Return rows of ids, padded at their end to the longest of those that are read at once.

        A row without ids is one of padding alone, of length 1.
        """
        shape = (len(labels), self.towers)[: self.towers]
        lengths = np.maximum(np.diff(ends), 1)

        def read(rows: np.ndarray) -> tuple[np.ndarray, None]:
            places = (rows[:, None] * self.towers + np.arange(self.towers)).ravel()
            inputs = np.full((len(places), lengths[places].max(initial=1)), PAD, dtype=np.int64)
            for row, start, end in zip(inputs, ends[places], ends[places + 1], strict=True):
                row[: end - start] = ids[start:end]
                row[: end - start] += 1
            return inputs.reshape(len(rows), *shape[1:], -1), None

        return Examples(read, lengths.reshape(shape), labels, origin)


_ARRAYS = ("ids", "ends", "labels")


def _file(split: str, array: str) -> str:
    return f"{split}.{array}.npy"


def _write(
    folder: Path,
    key: dict[str, Any],
    splits: Mapping[str, tuple[Iterable[bytes], Iterable[int]]],
    origin: dict[str, Any],
) -> None:
    with atomic_folder(folder, flag="--cache") as new:
        paths = []
        for split, (rows, labels) in splits.items():
            ids, ends = bytearray(), [0]
            for row in rows:
                ids += row
                ends.append(len(ids))
            found = np.frombuffer(ids, dtype=np.uint8), np.array(ends, dtype=np.int64)
            for name, array in zip(
                _ARRAYS, (*found, np.fromiter(labels, dtype=np.int64)), strict=True
            ):
                paths.append(new / _file(split, name))
                np.save(paths[-1], array, allow_pickle=False)
        digests = {path.name: digest for path, digest in checksums(paths, "sha256").items()}
        kept = {"format": 1, "key": key, "origin": origin, "sha256": digests}
        write_sealed(new / _RECORD, kept)


def _checked(folder: Path) -> dict[str, Any]:
    """Return the origin of what a folder holds. Raises UserError where that was changed."""
    record, advice = folder / _RECORD, f"delete {folder}, and the same command makes it again"
    values, is_whole = unseal(read_object(record, advice))
    kept = check_shape(values, _Record, str(record), advice)
    if not is_whole:
        raise UserError(f"{record}: was changed after it was written; {advice}")
    for file in kept.sha256:
        if not (folder / file).is_file():
            raise UserError(f"{folder / file}: is missing; {advice}")
    for path in changed_files(folder, kept.sha256):
        raise UserError(f"{path}: is not the one that was written; {advice}")
    return kept.origin


def held_out(contents: Iterable[bytes], share: float = HELD_OUT) -> np.ndarray:
    """Choose rows by their content alone, so that no order of files matters.

    The rows with the smallest hashes go; rows of one content go together, so that the count may be
    larger by as many.

    Args:
        contents: the contents of all rows.
        share: the fraction of the rows to hold out.

    Returns:
        [n] bool.
    """
    digests = (hashlib.sha256(content).digest()[:8] for content in contents)
    hashes = np.array([int.from_bytes(digest, "big") for digest in digests], dtype=np.uint64)
    count = int(share * len(hashes))
    if count == 0:
        return np.zeros(len(hashes), dtype=bool)
    return hashes <= np.sort(hashes)[count - 1]
