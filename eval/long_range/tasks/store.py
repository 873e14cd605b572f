"""Keep what takes long to make: arrays in a folder of the cache, mapped into memory when read.

A folder is named by all that decides its arrays, appears whole or not at all, and is made by one
process while others wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import checksums, opened, write_sealed
from cat_lm.core.folders import atomic_folder, hold
from cat_lm.core.readers import Versioned, check_shape, read_object
from cat_lm.data.verified import changed_files
from eval.lab.store import key_hash
from eval.long_range.tasks.base import PAD, Examples, Place

Arrays = dict[str, np.ndarray]
Made = tuple[Arrays, dict[str, Any]]  # arrays by name, and where they come from
HELD_OUT = 0.1  # of the training rows, for validation
_RECORD = "record.json"


class _Record(Versioned):
    key: dict[str, Any]
    origin: dict[str, Any]
    sha256: dict[str, str]


def stored(place: Place, name: str, key: Mapping[str, Any], make: Callable[[], Made]) -> Made:
    """Return arrays from the cache; made and kept where they are not there yet.

    Args:
        name: begins the folder's name.
        key: plain values, all that decides the arrays.

    Raises:
        UserError: of `make`; or the folder holds something else than was written.
    """
    folder = place.cache / f"{name}-{key_hash(key)}"
    record = folder / _RECORD
    if not record.is_file():
        place.cache.mkdir(parents=True, exist_ok=True)
        with hold(place.cache / f".{folder.name}.lock"):
            if not record.is_file():
                arrays, origin = make()
                with atomic_folder(folder, flag="--cache") as new:
                    paths = [new / f"{array}.npy" for array in arrays]
                    for path, array in zip(paths, arrays.values(), strict=True):
                        np.save(path, array, allow_pickle=False)
                    digests = {p.name: digest for p, digest in checksums(paths, "sha256").items()}
                    found = {"key": dict(key), "origin": origin, "sha256": digests}
                    write_sealed(new / _RECORD, {"format": 1, **found})
    advice = f"delete {folder}, and the same command makes it again"
    values, is_whole = opened(read_object(record, advice))
    kept = check_shape(values, _Record, str(record), advice)
    if not is_whole:
        raise UserError(f"{record}: was changed after it was written; {advice}")
    for file in kept.sha256:
        if not (folder / file).is_file():
            raise UserError(f"{folder / file}: is missing; {advice}")
    for path in changed_files(folder, kept.sha256):
        raise UserError(f"{path}: is not the one that was written; {advice}")
    arrays = {file: np.load(folder / file, mmap_mode="r") for file in kept.sha256}
    return {file.removesuffix(".npy"): array for file, array in arrays.items()}, kept.origin


def packed(split: str, rows: Iterable[bytes], labels: Iterable[int]) -> Arrays:
    """Lay out rows of ids as they are kept.

    Args:
        rows: a byte for each id less one (0 is padding's); of several towers, one after the
            other.
        labels: of all rows; read after them.
    """
    ids, ends = bytearray(), [0]
    for row in rows:
        ids += row
        ends.append(len(ids))
    kept = {"ids": np.frombuffer(ids, dtype=np.uint8), "ends": np.array(ends, dtype=np.int64)}
    kept["labels"] = np.fromiter(labels, dtype=np.int64)
    return {f"{split}.{name}": array for name, array in kept.items()}


def sequences(made: Made, split: str, towers: int = 1) -> Examples:
    """Return packed rows, padded at their end to the longest of those that are read at once.

    A row without ids is one of padding alone, of length 1.
    """
    arrays, origin = made
    ids, ends, labels = (arrays[f"{split}.{name}"] for name in ("ids", "ends", "labels"))
    shape = (len(labels), towers)[:towers]
    lengths = np.maximum(np.diff(ends), 1)

    def read(rows: np.ndarray) -> tuple[np.ndarray, None]:
        places = (rows[:, None] * towers + np.arange(towers)).ravel()
        inputs = np.full((len(places), lengths[places].max(initial=1)), PAD, dtype=np.int64)
        for row, start, end in zip(inputs, ends[places], ends[places + 1], strict=True):
            row[: end - start] = ids[start:end]
            row[: end - start] += 1
        return inputs.reshape(len(rows), *shape[1:], -1), None

    return Examples(read, lengths.reshape(shape), labels, origin)


def held_out(contents: Iterable[bytes], share: float = HELD_OUT) -> np.ndarray:
    """Choose rows by their content alone, so that no order of files matters.

    The rows with the smallest hashes go; rows of one content go together, so that the count may be
    larger by as many.

    Args:
        contents: of all rows.
        share: of the rows that go.

    Returns:
        [n] bool.
    """
    digests = (hashlib.sha256(content).digest()[:8] for content in contents)
    hashes = np.array([int.from_bytes(digest, "big") for digest in digests], dtype=np.uint64)
    count = int(share * len(hashes))
    if count == 0:
        return np.zeros(len(hashes), dtype=bool)
    return hashes <= np.sort(hashes)[count - 1]
