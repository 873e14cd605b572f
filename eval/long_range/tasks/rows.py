"""Rows of ids of any lengths and rows of pixels, as they are kept and as models read them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from eval.long_range.tasks.base import PAD, Batch, Examples
from eval.long_range.tasks.store import Stored, Work


def save_sequences(work: Work, split: str, rows: Iterable[bytes], labels: Iterable[int]) -> None:
    """Keep rows of ids.

    Args:
        rows: a byte for each id less one (0 is padding's); of several towers, one after the
            other.
        labels: of all rows; read after them.
    """
    ids, ends = bytearray(), [0]
    for row in rows:
        ids += row
        ends.append(len(ids))
    work.save(f"{split}.ids", np.frombuffer(ids, dtype=np.uint8))
    work.save(f"{split}.ends", np.array(ends, dtype=np.int64))
    work.save(f"{split}.labels", np.fromiter(labels, dtype=np.int64))


class Sequences(Examples):
    """Rows of ids, padded at their end. A row without ids is one of padding alone, of length 1."""

    def __init__(self, stored: Stored, split: str, length: int, towers: int = 1) -> None:
        self.labels, self.origin = stored.arrays[f"{split}.labels"], stored.origin
        self._ids, self._ends = stored.arrays[f"{split}.ids"], stored.arrays[f"{split}.ends"]
        self._length, self._towers = length, towers

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self) -> np.ndarray:
        return self._shaped(np.maximum(np.diff(self._ends), 1))

    def batch(self, rows: np.ndarray, *, full: bool = False) -> Batch:
        rows = np.arange(len(self))[rows]
        places = (rows[:, None] * self._towers + np.arange(self._towers)).ravel()
        starts, ends = self._ends[places], self._ends[places + 1]
        lengths = np.maximum(ends - starts, 1)
        width = self._length if full else int(lengths.max(initial=1))
        inputs = np.full((len(places), width), PAD, dtype=np.int64)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            inputs[row, : end - start] = self._ids[start:end]
            inputs[row, : end - start] += 1
        shaped = inputs if self._towers == 1 else inputs.reshape(len(rows), self._towers, width)
        return Batch(shaped, self._shaped(lengths), np.asarray(self.labels[rows]))

    def _shaped(self, lengths: np.ndarray) -> np.ndarray:
        return lengths if self._towers == 1 else lengths.reshape(-1, self._towers)


def save_pixels(work: Work, split: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Keep images [n, pixels] uint8 and their classes."""
    work.save(f"{split}.pixels", pixels)
    work.save(f"{split}.labels", np.asarray(labels, dtype=np.int64))


class Pixels(Examples):
    """Images whose pixels are positions."""

    def __init__(
        self, stored: Stored, split: str, read: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Take images from the cache.

        Args:
            read: [n, pixels] uint8 to what a model reads.
        """
        self.labels, self.origin = stored.arrays[f"{split}.labels"], stored.origin
        self._pixels, self._read = stored.arrays[f"{split}.pixels"], read

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self) -> np.ndarray:
        positions = self._read(self._pixels[:1]).shape[1]
        return np.full(len(self), positions, dtype=np.int64)

    def batch(self, rows: np.ndarray, *, full: bool = False) -> Batch:
        inputs = self._read(np.asarray(self._pixels[rows]))
        lengths = np.full(len(inputs), inputs.shape[1], dtype=np.int64)
        return Batch(inputs, lengths, np.asarray(self.labels[rows]))


def held_out(contents: Iterable[bytes], share: float) -> np.ndarray:
    """Choose rows by their content alone, so that no order of files matters.

    The rows with the smallest hashes go; rows of one content go together, so that the count may be
    larger by as many.

    Args:
        contents: of all rows.
        share: of the rows that go.

    Returns:
        [n] bool.
    """
    hashes = np.array([_hash(content) for content in contents], dtype=np.uint64)
    count = int(share * len(hashes))
    if count == 0:
        return np.zeros(len(hashes), dtype=bool)
    return hashes <= np.sort(hashes)[count - 1]


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
