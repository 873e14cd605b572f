"""Say what a task is: facts that a model is built from, and rows that it is trained on.

Nothing here imports torch. A task is a frozen set of options; its rows are numpy arrays that are
decoded a batch at a time, from memory or from files mapped into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cat_lm.data.verified import cache_folder
from eval.lab import tasks

SPLITS = ("train", "validation", "test")
PAD = 0  # the id that fills up rows of ids at their end


@dataclass(frozen=True)
class Batch:
    """Rows as a model reads them.

    Attributes:
        inputs: [n, T] int64 ids, or [n, T, channels] float32; a task of two towers has [n, 2, T].
        lengths: [n] or [n, 2] int64, positions that are no padding; padding stands at the end.
        labels: [n] int64 classes, or [n, scored] float32 values of the last `scored` positions.
    """

    inputs: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Place:
    """Where data lies; nothing of it belongs to what names a result.

    Attributes:
        folder: official files, `folder/NAME/…` or those of the one data set itself; None: the
            Hugging Face Hub, at pinned revisions.
        cache: what was generated or encoded once is kept here.
        workers: processes that generate or encode.
    """

    folder: Path | None = None
    cache: Path = field(default_factory=lambda: cache_folder(None) / "long_range")
    workers: int = 1


class Examples:
    """The rows of one split.

    Attributes:
        labels: [n] int64, the classes of all rows; None where values are predicted.
        origin: files with their sha256, or the generator with its version and seed.
    """

    labels: np.ndarray | None
    origin: Mapping[str, Any]

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, rows: np.ndarray, *, full: bool = False) -> Batch:
        """Decode rows.

        Args:
            rows: [n] indices.
            full: pad to the task's length, not to the longest of these rows.
        """
        raise NotImplementedError

    def lengths(self) -> np.ndarray:
        """Return the lengths of all rows, as in `Batch`."""
        raise NotImplementedError

    def subset(self, count: int, seed: int) -> Examples:
        """Return `count` rows drawn without replacement; a larger count holds the smaller ones.

        Raises:
            ValueError: there are fewer rows.
        """
        if not 0 <= count <= len(self):
            raise ValueError(f"{count:,} rows were asked for; there are {len(self):,}")
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(self)])))
        return _Subset(self, np.sort(rng.permutation(len(self))[:count]))


class _Subset(Examples):
    def __init__(self, whole: Examples, rows: np.ndarray) -> None:
        self._whole, self._rows = whole, rows
        self.labels = None if whole.labels is None else whole.labels[rows]
        self.origin = whole.origin

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: np.ndarray, *, full: bool = False) -> Batch:
        return self._whole.batch(self._rows[rows], full=full)

    def lengths(self) -> np.ndarray:
        return self._whole.lengths()[self._rows]


class Exchanged(Examples):
    """Rows of classes, each with the inputs of another: what is learned of them is nothing."""

    def __init__(self, whole: Examples, order: np.ndarray) -> None:
        """Exchange inputs.

        Args:
            order: [n], the row whose inputs each row gets.
        """
        self._whole, self._order = whole, order
        self.labels, self.origin = whole.labels, whole.origin

    def __len__(self) -> int:
        return len(self._whole)

    def batch(self, rows: np.ndarray, *, full: bool = False) -> Batch:
        others = self._whole.batch(self._order[rows], full=full)
        return Batch(others.inputs, others.lengths, np.asarray(self.labels[rows]))

    def lengths(self) -> np.ndarray:
        return self._whole.lengths()[self._order]


@dataclass(frozen=True)
class Task(tasks.Task):
    """The options of a task.

    Attributes:
        name: of the task in the registry.
        version: raised when the same options give other rows; stands in `describe`.
        metric: `accuracy`, or `r2`: 1 − squared error / variance, over all scored values of a
            split.
        towers: sequences of a row that the same encoder reads.
        official: rows of the splits of the paper's data, for comparison; a split that the
            official data lacks has 0.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "accuracy"
    towers: ClassVar[int] = 1
    official: ClassVar[Mapping[str, int]] = {}

    @property
    def length(self) -> int:
        """T, the most positions of a row."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Real numbers of a position; 0 where inputs are ids."""
        return 0

    @property
    def classes(self) -> int:
        """Classes of a row; 0 where values of positions are predicted."""
        raise NotImplementedError

    @property
    def scored(self) -> int:
        """Positions at the end of a row with a value to predict; 0 where a row has a class."""
        return 0

    @property
    def reads_files(self) -> bool:
        """Return True if rows come from files or the Hub, so that a place may have others."""
        return True

    @property
    def needs_folder(self) -> bool:
        """Return True if rows come from files alone, which the Hub does not have."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader of results must know: sentences for their page."""
        return ()

    def counted(self, split: str, rows: int) -> str:
        """Count a split's rows in words, beside those of the paper's data where these differ."""
        official = self.official.get(split) or rows
        beside = f" (official: {official:,})" if official != rows else ""
        return f"{split}: {rows:,} rows{beside}"

    def load(self, split: str, place: Place | None = None) -> Examples:
        """Return the rows of a split; what takes long to make is made once, in `place.cache`.

        Raises:
            UserError: official files are missing, truncated or others; the line names the file,
                what was expected and where it is had.
        """
        raise NotImplementedError

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        """Write one sequence [T] or [T, channels] for people; channels a line each.

        Args:
            origin: of its examples.
        """
        lines = inputs.T if inputs.ndim == 2 else [inputs]
        return "\n".join(" ".join(f"{value:.4g}" for value in line) for line in lines)

    def describe(self) -> dict[str, Any]:
        """Return all that decides the rows, as plain values: the name, the version, the options."""
        return {"task": self.name, "version": self.version, **super().describe()}
