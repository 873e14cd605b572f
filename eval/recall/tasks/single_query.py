"""AR and NAR: the last N tokens stand once before in the sequence; answer with the token after.

Two layouts. `free` is the paper's Definitions 2 and 3 as they read: every token is free, and the
query's only earlier copy is anywhere that does not overlap the query itself. `pairs` is Table 1:
keys and values alternate, k1 v1 k2 v2 … q, with tokens as in MQAR. The label is at the last
position. In free rows of not many more than 2N tokens, N > 1, the copy often stands right before
the query, whose first token the answer then is: there `chance` is less than what can be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers.parts.base import check_choice, check_counts
from eval.recall.tasks.base import Examples, Task, distinct_ngrams, draw_distinct, require

LAYOUTS = ("pairs", "free")
_ROUNDS = 1000  # the most redraws of rows with accidental copies


@dataclass(frozen=True)
class SingleQueryRecall(Task):
    """Options of AR and NAR.

    Attributes:
        ngram: N, tokens of the query.
        layout: pairs or free.
        vocab_size: V. Pairs: keys of 1..V/2−1, values of V/2..V−1; free: 1..V−1.
    """

    ngram: int = 1
    layout: str = "pairs"
    vocab_size: int = 8192

    def __post_init__(self) -> None:
        n, length, v = self.ngram, self.seq_len, self.vocab_size
        check_counts(self, "ngram")
        check_choice(self, "layout", LAYOUTS)
        least = 2 * n + (self.layout == "pairs")
        require(
            length >= least,
            f"a {n}-gram and its copy need {least} tokens; seq_len={length} is too short",
        )
        if self.layout == "pairs":
            k, half = self.num_keys, v // 2
            fits = (half - 1) ** n >= k and v - half >= k
            require(fits, f"vocab_size={v}: too small for {k} distinct pairs")
        else:
            fits = v >= 3 and (n == 1 or 4 * (v - 1) ** n >= length)
            few = f"too few {n}-grams for one to be unique among {length} tokens"
            require(fits, f"vocab_size={v}: {few}")

    @property
    def num_keys(self) -> int:
        """Return the number of pairs before the query; the rest of seq_len is leading zeros."""
        return (self.seq_len - self.ngram) // (self.ngram + 1)

    @property
    def vocabulary(self) -> int:
        return self.vocab_size

    @property
    def chance(self) -> float:
        if self.layout == "pairs":
            return 1 / (self.vocab_size - self.vocab_size // 2)
        if self.ngram > 1:  # Rows then have a few N-grams more, see the module's docstring.
            return 1 / (self.vocab_size - 1)
        # The copy stands right before the query in one row of T − 1: then the answer is the query,
        # and otherwise any other token.
        beside = 1 / (self.seq_len - 1)
        return max((1 - beside) / (self.vocab_size - 2), beside)

    def groups(self, inputs: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return the groups `shared` (another key has the row's last token) and `unshared`."""
        if self.ngram == 1:
            return {}
        shared = self._meant(inputs).sum(axis=1, keepdims=True) > 1
        return {"shared": shared, "unshared": ~shared}

    def one_token(self, examples: Examples) -> dict[str, float]:
        """Return `one_token_ceiling`, the accuracy of the best answers by the last token alone.

        Those are what most often follows it where it may end a key: each pair's, or, in the free
        layout, anywhere that a copy may end. Nothing for N = 1, where one token is all.
        """
        if self.ngram == 1:
            return {}
        following = examples.inputs[:, 1:]
        best = [
            (counts := np.unique(following[row][meant], return_counts=True)[1]).max() / counts.sum()
            for row, meant in enumerate(self._meant(examples.inputs))
        ]
        return {"one_token_ceiling": float(np.mean(best))}

    def _meant(self, inputs: np.ndarray) -> np.ndarray:
        """Return [rows, T − 1] bool: positions where a key ends with the row's last token."""
        n, ends = self.ngram, np.zeros(self.seq_len - 1, dtype=bool)
        if self.layout == "pairs":
            ends[self.seq_len - n - 2 - (n + 1) * np.arange(self.num_keys)] = True
        else:  # Draw tokens [rows, T]; for N = 1 without the query, so that no copy is accidental.
            ends[n - 1 : self.seq_len - n] = True
        return (inputs[:, :-1] == inputs[:, -1:]) & ends

    def rows(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, answers = (self._pairs if self.layout == "pairs" else self._free)(rng, count)
        labels = np.full(inputs.shape, IGNORE_INDEX, dtype=np.int64)
        labels[:, -1] = answers
        return inputs, labels

    def _pairs(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        k, n, half = self.num_keys, self.ngram, self.vocab_size // 2
        keys = distinct_ngrams(rng, count, k, n, half - 1) + 1
        values = draw_distinct(rng, count, k, half, self.vocab_size)
        asked, rows = rng.integers(0, k, count), np.arange(count)
        inputs = np.zeros((count, self.seq_len), dtype=np.int64)
        pairs = np.concatenate([keys, values[:, :, None]], axis=2).reshape(count, k * (n + 1))
        inputs[:, -n - k * (n + 1) : -n] = pairs
        inputs[:, -n:] = keys[rows, asked]
        return inputs, values[rows, asked]

    def _free(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        n = self.ngram
        inputs = np.empty((count, self.seq_len), dtype=np.int64)
        position = np.empty(count, dtype=np.int64)
        todo = np.arange(count)
        for _ in range(_ROUNDS):
            query = rng.integers(1, self.vocab_size, (len(todo), n))
            place = rng.integers(0, self.seq_len - 2 * n + 1, len(todo))
            drawn = self._background(rng, query)
            drawn[:, -n:] = query
            np.put_along_axis(drawn, place[:, None] + np.arange(n), query, axis=1)
            inputs[todo], position[todo] = drawn, place
            todo = todo[copies(drawn, n) != 2]
            if not len(todo):
                return inputs, inputs[np.arange(count), position + n]
        raise UserError(f"vocab_size={self.vocab_size}: too small for a unique {n}-gram")

    def _background(self, rng: np.random.Generator, query: np.ndarray) -> np.ndarray:
        """Tokens [rows, T]; for N = 1 any but the query, so that no copy is accidental."""
        shape = (len(query), self.seq_len)
        if self.ngram > 1:
            return rng.integers(1, self.vocab_size, shape)
        others = rng.integers(1, self.vocab_size - 1, shape)
        return others + (others >= query)


def copies(inputs: np.ndarray, ngram: int) -> np.ndarray:
    """Return [rows]: how often a row's last n-gram occurs in it, including its end."""
    time = inputs.shape[1]
    same = np.ones((len(inputs), time - ngram + 1), dtype=bool)
    for i in range(ngram):
        same &= inputs[:, i : time - ngram + 1 + i] == inputs[:, time - ngram + i, None]
    return same.sum(axis=1)
