"""Share what tasks need: splits that cannot overlap, draws without replacement for many rows.

Rows are pure functions of (task, seed, split, their number). A row belongs to the split that a hash
of its inputs names, and a row of another split is drawn again: the splits are disjoint whatever
their seeds and numbers, and each is spread evenly over what the task can produce. Test has half of
it, validation an eighth, training the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from cat_lm.core.errors import UserError
from eval.lab import tasks

SPLITS = ("train", "test", "validation")
_ROWS = 2048  # number of rows that are generated at once, to save memory
_ROUNDS = 400  # consecutive draws without a new row after which a task counts as exhausted


@dataclass(frozen=True)
class Examples:
    """Inputs and labels [rows, T] int64; a label of IGNORE_INDEX is not scored.

    All rows score equally many positions, n.

    Attributes:
        groups: name -> [rows, n] bool, scored positions whose accuracy is also told by itself.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Task(tasks.Task):
    """A task's options and its generator.

    Attributes:
        seq_len: T, the tokens that a model reads.
        recalls: whether an answer is the token after an earlier key.
        runs_free: whether a model is also tested with its own answers fed back in place of the
            labels.
    """

    seq_len: int
    recalls: ClassVar[bool] = True
    runs_free: ClassVar[bool] = False

    @property
    def chance(self) -> float:
        """Return the best accuracy of answers from one token alone: the limit without mixing."""
        raise NotImplementedError

    def at_length(self, seq_len: int) -> Task:
        """Return the same task at another length, with its items scaled as in the paper."""
        return replace(self, seq_len=seq_len)

    def with_as_many_keys(self, seq_len: int) -> Task | None:
        """Return the same task at another length with as many keys; None without keys."""
        return None

    def rows(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw inputs and labels [count, T]."""
        raise NotImplementedError

    def groups(self, inputs: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return name -> bool [rows, n]: the kinds of scored positions of rows [rows, T]."""
        return {}

    def one_token(self, examples: Examples) -> dict[str, float]:
        """Return the accuracy of matching only a query's last token on these rows; {} for N = 1."""
        return {}


def require(holds: object, problem: str) -> None:
    """Raise ValueError for options that do not fit together."""
    if not holds:
        raise ValueError(problem)


def generate(task: Task, count: int, *, seed: int, split: str) -> Examples:
    """Return `count` rows of a task, the same for the same arguments.

    Args:
        split: train, test or validation; no row is in two. Rows of the latter two have groups.

    Raises:
        UserError: the task has too few different rows for a split of its own.
        ValueError: an unknown split.
    """
    part = SPLITS.index(split)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, part])))
    kept = [(np.zeros((0, task.seq_len), np.int64),) * 2]
    have = fruitless = 0
    while have < count:
        inputs, labels = task.rows(rng, min(_ROWS, 2 * (count - have) + 16))
        mine = row_splits(inputs) == part
        fruitless = 0 if mine.any() else fruitless + 1
        if fruitless == _ROUNDS:
            raise UserError(f"{type(task).__name__}: too few different rows for a {split} split")
        kept.append((inputs[mine], labels[mine]))
        have += int(mine.sum())
    inputs, labels = (
        np.concatenate(rows)[:count].astype(np.int64) for rows in zip(*kept, strict=True)
    )
    return Examples(inputs, labels, {} if split == "train" else task.groups(inputs, labels))


def row_splits(rows: np.ndarray) -> np.ndarray:
    """Return the split of each row [n, T], an index of SPLITS [n], from a hash of the row."""
    value = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T.astype(np.uint64):
        value = (value ^ column) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    bits = (value >> np.uint64(59)).astype(np.int64) & 7
    return np.where(bits == 3, SPLITS.index("validation"), bits >> 2)


def draw_distinct(
    rng: np.random.Generator, rows: int, count: int, low: int, high: int
) -> np.ndarray:
    """[rows, count] of low..high−1, distinct within a row, all ordered choices equally likely."""
    values = distinct_ngrams(rng, rows, count, 1, high - low)
    return values[:, :, 0] + low


def distinct_ngrams(
    rng: np.random.Generator, rows: int, count: int, ngram: int, tokens: int
) -> np.ndarray:
    """Draw [rows, count, ngram] of 0..tokens−1: n-grams distinct within a row, all choices equally
    likely.

    Repeats within a row are drawn again until there are none. No step tells one n-gram from
    another, so by symmetry every choice of distinct n-grams is equally likely.

    Raises:
        ValueError: there are fewer than `count` different n-grams.
    """
    total = tokens**ngram
    require(count <= total, f"{count} distinct {ngram}-grams of {tokens} tokens: there are {total}")
    if total <= 4 * count:  # Too many draws would be repeats.
        order = rng.random((rows, total)).argsort(axis=1, kind="stable")[:, :count]
        return np.stack([order // tokens**i % tokens for i in range(ngram)], axis=2)
    drawn, todo = rng.integers(0, tokens, (rows, count, ngram)), np.arange(rows)
    while len(todo):
        part = drawn[todo]
        repeated = _repeats(part, tokens)
        part[repeated] = rng.integers(0, tokens, (int(repeated.sum()), ngram))
        drawn[todo] = part
        todo = todo[repeated.any(axis=1)]
    return drawn


def _repeats(ngrams: np.ndarray, tokens: int) -> np.ndarray:
    """Return [rows, count] bool: whether an n-gram [rows, count, ngram] occurs earlier in its row.

    N-grams are compared by codes modulo 2^64, exact while tokens^ngram is below that; beyond, a
    clash of codes only makes one more draw.
    """
    codes = np.zeros(ngrams.shape[:2], dtype=np.uint64)
    for column in np.moveaxis(ngrams.astype(np.uint64), 2, 0):
        codes = codes * np.uint64(tokens) + column
    order = codes.argsort(axis=1, kind="stable")
    ranked = np.take_along_axis(codes, order, axis=1)
    same = np.zeros(codes.shape, dtype=bool)
    same[:, 1:] = ranked[:, 1:] == ranked[:, :-1]
    found = np.zeros_like(same)
    np.put_along_axis(found, order, same, axis=1)
    return found


def weighted_order(
    rng: np.random.Generator, rows: int, count: int, weights: np.ndarray
) -> np.ndarray:
    """Draw [rows, count] indices one after the other without replacement.

    Each draw has probabilities in proportion to the weights that are left, as numpy's
    `choice(replace=False, p=weights)`. (Gumbel's trick: sort log weights plus Gumbel noise.)
    """
    noise = -np.log(-np.log1p(-rng.random((rows, len(weights)))) + 1e-300)
    return np.argsort(-(np.log(weights) + noise), axis=1)[:, :count]


def draw_unused(
    rng: np.random.Generator, shape: tuple[int, int], vocabulary: int, taken: np.ndarray
) -> np.ndarray:
    """Tokens [rows, n] uniform over the vocabulary without those that a row has taken.

    Args:
        taken: [rows, m] tokens.
    """
    taken = np.sort(taken, axis=1)
    new = np.ones(taken.shape, dtype=bool)
    new[:, 1:] = taken[:, 1:] != taken[:, :-1]
    # The r-th token that is left is r plus the number of taken tokens at or below it: those whose
    # own rank among what is left is at most r.
    below = np.where(new, taken - (new.cumsum(axis=1) - 1), vocabulary)
    below.sort(axis=1)
    left = vocabulary - new.sum(axis=1)
    drawn = (rng.random(shape) * left[:, None]).astype(np.int64)
    start = np.arange(shape[0])[:, None]
    shifted = (below + start * (vocabulary + 1)).ravel()
    found = np.searchsorted(shifted, (drawn + start * (vocabulary + 1)).ravel(), side="right")
    return drawn + found.reshape(shape) - start * taken.shape[1]
