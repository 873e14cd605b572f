"""Select, CumSum and CumMax: three of the atomic tasks of DLR (Gupta et al., 2022, section 3.1).

Numbers are normal and divided by the largest magnitude of their row. Beside each position's number
stand the cosine and the sine of 2π·position/T. A row is a pure function of the seed, the split and
its own number, so that any number of rows costs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from eval.long_range.tasks.base import SPLITS, Batch, Examples, Place, Task


@dataclass(frozen=True)
class AtomicTask(Task):
    """Rows of real numbers, drawn anew by seed, with values to predict.

    Attributes:
        train, validation, test: rows; the default is DLR's 12 epochs of 16,000 new ones.
        seed: of the rows.
    """

    metric: ClassVar[str] = "r2"
    train: int = 192_000
    validation: int = 2_000
    test: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        for split in SPLITS:
            if getattr(self, split) < 1:
                raise ValueError(f"{split}={getattr(self, split)}: must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be at least 0")

    @property
    def reads_files(self) -> bool:
        return False

    @property
    def vocabulary(self) -> int:
        return 0

    @property
    def classes(self) -> int:
        return 0

    def load(self, split: str, place: Place | None = None) -> Examples:
        return _Generated(self, split)

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw one row: [T, channels without positions] inputs and [scored] values."""
        raise NotImplementedError


@dataclass(frozen=True)
class Running(AtomicTask):
    """A value for each position, of it and all before it.

    Attributes:
        seq_len: T.
    """

    seq_len: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len}: must be at least 2")

    @property
    def length(self) -> int:
        return self.seq_len

    @property
    def channels(self) -> int:
        return 3

    @property
    def scored(self) -> int:
        return self.seq_len

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        numbers = _numbers(rng, self.seq_len)
        return numbers[:, None], self.values(numbers)

    def values(self, numbers: np.ndarray) -> np.ndarray:
        """Return what is to be predicted of numbers [T]."""
        raise NotImplementedError


@dataclass(frozen=True)
class CumSum(Running):
    """The sum of the first i numbers, i-th included, over √i: each has the same variance."""

    name: ClassVar[str] = "cumsum"

    def values(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.cumsum() / np.sqrt(np.arange(1, len(numbers) + 1))


@dataclass(frozen=True)
class CumMax(Running):
    """The largest of the first i numbers, i-th included."""

    name: ClassVar[str] = "cummax"

    def values(self, numbers: np.ndarray) -> np.ndarray:
        return np.maximum.accumulate(numbers)


@dataclass(frozen=True)
class Select(AtomicTask):
    """Numbers of which some are marked, then as many blanks, where these are told in order.

    T = noise + 2·marked: `marked` of the first noise + marked positions have a 1 as a second
    channel, anywhere; the last `marked` positions are zeros and are scored.

    Attributes:
        noise: numbers without a mark.
        marked: numbers with one.
    """

    name: ClassVar[str] = "select"
    noise: int = 512
    marked: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 1 or self.marked < 1:
            raise ValueError(f"noise={self.noise}, marked={self.marked}: must be at least 1")

    @property
    def length(self) -> int:
        return self.noise + 2 * self.marked

    @property
    def channels(self) -> int:
        return 4

    @property
    def scored(self) -> int:
        return self.marked

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        filled = self.noise + self.marked
        inputs = np.zeros((self.length, 2))
        inputs[:filled, 0] = _numbers(rng, filled)
        chosen = np.sort(rng.permutation(filled)[: self.marked])
        inputs[chosen, 1] = 1
        return inputs, inputs[chosen, 0]


def _numbers(rng: np.random.Generator, count: int) -> np.ndarray:
    numbers = rng.standard_normal(count)
    return numbers / np.abs(numbers).max()


class _Generated(Examples):
    """Rows that are drawn when they are asked for."""

    labels = None

    def __init__(self, task: AtomicTask, split: str) -> None:
        # The key of a counter-based generator, whose counter is the row's number.
        words = np.random.SeedSequence([task.version, task.seed, SPLITS.index(split)])
        self._key = words.generate_state(2, np.uint64)
        self._task, self._count = task, int(getattr(task, split))
        self.origin = {"generator": task.name, "version": task.version, "seed": task.seed}
        angles = 2 * np.pi * np.arange(task.length) / task.length
        self._positions = np.stack([np.cos(angles), np.sin(angles)], axis=1)

    def __len__(self) -> int:
        return self._count

    def lengths(self) -> np.ndarray:
        return np.full(self._count, self._task.length, dtype=np.int64)

    def batch(self, rows: np.ndarray, *, full: bool = False) -> Batch:
        task = self._task
        inputs = np.empty((len(rows), task.length, task.channels), dtype=np.float32)
        inputs[:, :, -2:] = self._positions
        labels = np.empty((len(rows), task.scored), dtype=np.float32)
        for place, row in enumerate(np.arange(self._count)[rows]):
            bits = np.random.Philox(key=self._key, counter=[0, 0, 0, int(row)])
            inputs[place, :, :-2], labels[place] = task.row(np.random.Generator(bits))
        return Batch(inputs, np.full(len(rows), task.length, dtype=np.int64), labels)
