"""Select, CumSum and CumMax: three of the atomic tasks of DLR (Gupta et al., 2022, section 3.1).

Numbers are normal and divided by the largest magnitude of their row. Beside each position's number
stand the cosine and the sine of 2π·position/T. A row is a pure function of the seed, the split and
its own number, so that any number of rows costs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cat_lm.mixers.parts.base import check_counts
from eval.long_range.tasks.base import SPLITS, Examples, GeneratedTask, Place


@dataclass(frozen=True)
class AtomicTask(GeneratedTask):
    """Rows of real numbers with values to predict; the default is DLR's 12 epochs of 16,000."""

    train: int = 192_000

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw one row: [T, channels without positions] inputs and [scored] values."""
        raise NotImplementedError

    def load(self, split: str, place: Place | None = None) -> Examples:
        # The key of a counter-based generator, whose counter is the row's number.
        words = np.random.SeedSequence([self.version, self.seed, SPLITS.index(split)])
        key = words.generate_state(2, np.uint64)
        angles = 2 * np.pi * np.arange(self.length) / self.length
        positions = np.stack([np.cos(angles), np.sin(angles)], axis=1)

        def read(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            inputs = np.empty((len(rows), self.length, self.channels), dtype=np.float32)
            inputs[:, :, -2:] = positions
            values = np.empty((len(rows), self.scored), dtype=np.float32)
            for place, row in enumerate(rows):
                bits = np.random.Philox(key=key, counter=[0, 0, 0, int(row)])
                inputs[place, :, :-2], values[place] = self.row(np.random.Generator(bits))
            return inputs, values

        lengths = np.full(getattr(self, split), self.length, dtype=np.int64)
        origin = {"generator": self.name, "version": self.version, "seed": self.seed}
        return Examples(read, lengths, None, origin)


@dataclass(frozen=True)
class Running(AtomicTask):
    """A value for each position, of it and all before it.

    Attributes:
        seq_len: T.
    """

    channels: ClassVar[int] = 3
    seq_len: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len}: must be at least 2")

    @property
    def length(self) -> int:
        return self.seq_len

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
    channels: ClassVar[int] = 4
    noise: int = 512
    marked: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "noise", "marked")

    @property
    def length(self) -> int:
        return self.noise + 2 * self.marked

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
