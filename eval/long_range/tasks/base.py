"""Tasks: facts that a model is built from, and rows that it is trained on.

Nothing here imports torch. A task is a frozen set of options; its rows are numpy arrays that are
decoded a batch at a time, from memory or from files mapped into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cat_lm.data.verified import cache_folder
from cat_lm.mixers.parts.base import check_counts
from eval.lab import tasks

SPLITS = ("train", "validation", "test")
PAD = 0  # the id that fills up rows of ids at their end


class Batch(NamedTuple):
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
    """Where data lies, which is no part of a result's name.

    Attributes:
        folder: official files, `folder/NAME/…` or those of the one data set itself; None: the
            Hugging Face Hub, at pinned revisions.
        cache: folder of generated and encoded rows.
        workers: processes that generate.
    """

    folder: Path | None = None
    cache: Path = field(default_factory=lambda: cache_folder(None) / "long_range")
    workers: int = 1


@dataclass(frozen=True)
class Examples:
    """The rows of one split.

    Attributes:
        read: [n] row numbers to inputs, and to values or None, as `Batch` has them.
        lengths: the lengths of all rows.
        labels: [rows] int64 classes; None if values are predicted.
        origin: files with their sha256, or the generator with its version and seed.
    """

    read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
    lengths: np.ndarray
    labels: np.ndarray | None
    origin: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: np.ndarray) -> Batch:
        """Decode rows by their numbers [n]. Raises IndexError."""
        lengths = self.lengths[rows]
        inputs, values = self.read(rows)
        labels = values if self.labels is None else np.asarray(self.labels[rows])
        return Batch(inputs, lengths, labels)

    def subset(self, count: int, seed: int) -> Examples:
        """Return `count` rows drawn without replacement; a larger count holds the smaller ones."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(self)])))
        rows = np.sort(rng.permutation(len(self))[:count])
        return self._with_inputs(rows, None if self.labels is None else self.labels[rows])

    def exchanged(self, order: np.ndarray) -> Examples:
        """Return the examples with permuted inputs, from which nothing can be learned."""
        return self._with_inputs(order, self.labels)

    def _with_inputs(self, rows: np.ndarray, labels: np.ndarray | None) -> Examples:
        return Examples(lambda some: self.read(rows[some]), self.lengths[rows], labels, self.origin)


@dataclass(frozen=True)
class Task(tasks.Task):
    """The options of a task, and facts of its rows.

    Attributes:
        name: the name of the task in the registry.
        version: raised when the same options give other rows; stands in `describe`.
        vocabulary: ids are below it; 0 where inputs are `channels` real numbers a position.
        classes: number of classes of a row; 0 if values of its last `scored` positions are
            predicted.
        towers: sequences of a row that the same encoder reads.
        official: rows of the splits of the paper's data; 0 for a split that it lacks.
        reads_files: whether rows come from files or the Hub, so that a place may have others.
        needs_folder: whether rows come from files alone, which the Hub does not have.
        notes: what a reader of results must know: sentences for their page.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    vocabulary: ClassVar[int] = 0
    channels: ClassVar[int] = 0
    classes: ClassVar[int] = 0
    scored: ClassVar[int] = 0
    towers: ClassVar[int] = 1
    official: ClassVar[Mapping[str, int]] = {}
    reads_files: ClassVar[bool] = True
    needs_folder: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()

    @property
    def metric(self) -> str:
        """`accuracy`; of values `r2`: 1 − squared error / variance, over all of a split."""
        return "accuracy" if self.classes else "r2"

    @property
    def length(self) -> int:
        """Return T, the most positions of a row."""
        raise NotImplementedError

    def load(self, split: str, place: Place | None = None) -> Examples:
        """Return the rows of a split; rows that are slow to make are cached in `place.cache`.

        Raises:
            UserError: an official file is missing, truncated or another; the message names the
                file, what was expected and where to get it.
        """
        raise NotImplementedError

    def counted(self, split: str, rows: int) -> str:
        """Return a split's number of rows in words, beside the paper's where they differ."""
        official = self.official.get(split) or rows
        beside = f" (official: {official:,})" if official != rows else ""
        return f"{split}: {rows:,} rows{beside}"

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        """Format one sequence [T] or [T, channels] for display."""
        lines = inputs.T if inputs.ndim == 2 else [inputs]
        return "\n".join(" ".join(f"{value:.4g}" for value in line) for line in lines)

    def describe(self) -> dict[str, Any]:
        """Return all that decides the rows, as plain values: the name, the version, the options."""
        return {"task": self.name, "version": self.version, **super().describe()}


@dataclass(frozen=True)
class GeneratedTask(Task):
    """A task of rows that a seed decides.

    Attributes:
        train, validation, test: rows to generate.
        seed: the seed of the generator.
    """

    reads_files: ClassVar[bool] = False
    train: int = 96_000
    validation: int = 2_000
    test: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, *SPLITS)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be at least 0")
