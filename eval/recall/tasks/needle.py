"""Needles in a haystack: a few keys with values anywhere in a long text, asked for at its end.

    … k2 v2 … … k1 v1 … k1 k2,     at whose last two tokens v1 and v2 are the answers.

The haystack is drawn from all tokens but the row's keys. At other lengths the needles are as many:
there is more to look through, and not more to remember.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers.parts.base import check_counts
from eval.recall.tasks.base import Task, draw_distinct, draw_unused, require

PARTS = ("early", "middle", "late")  # thirds of the haystack


@dataclass(frozen=True)
class NeedleRecall(Task):
    """Options of needles.

    Attributes:
        keys: the needles k, all of which are asked, in another order.
        vocab_size: V; keys are of 1..V/2−1, values of V/2..V−1.
    """

    keys: int = 4
    vocab_size: int = 8192

    def __post_init__(self) -> None:
        k, length, vocabulary = self.keys, self.seq_len, self.vocab_size
        check_counts(self, "keys")
        require(
            3 * k <= length,
            f"keys={k}: with their values and their questions need {3 * k} tokens; "
            f"seq_len={length} is too short",
        )
        require(vocabulary // 2 > k, f"vocab_size={vocabulary}: too small for {k} keys")

    @property
    def vocabulary(self) -> int:
        return self.vocab_size

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def groups(self, inputs: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return the third of the haystack that a needle is in: `early`, `middle` or `late`."""
        hay, asked = inputs[:, : -self.keys], inputs[:, -self.keys :]
        places = (hay[:, None, :] == asked[:, :, None]).argmax(axis=2)
        third = places * len(PARTS) // hay.shape[1]
        return {name: third == part for part, name in enumerate(PARTS)}

    def rows(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        k, half, hay = self.keys, self.vocab_size // 2, self.seq_len - self.keys
        keys = draw_distinct(rng, count, k, 1, half)
        values = draw_distinct(rng, count, k, half, self.vocab_size)
        inputs = np.empty((count, self.seq_len), dtype=np.int64)
        inputs[:, :hay] = draw_unused(rng, (count, hay), self.vocab_size, keys)
        # Pairs of two tokens that do not touch each other's: as if each were one token.
        places = np.sort(draw_distinct(rng, count, k, 0, hay - k), axis=1) + np.arange(k)
        np.put_along_axis(inputs, places, keys, axis=1)
        np.put_along_axis(inputs, places + 1, values, axis=1)
        order = rng.random((count, k)).argsort(axis=1)
        inputs[:, hay:] = np.take_along_axis(keys, order, axis=1)
        labels = np.full(inputs.shape, IGNORE_INDEX, dtype=np.int64)
        labels[:, hay:] = np.take_along_axis(values, order, axis=1)
        return inputs, labels
