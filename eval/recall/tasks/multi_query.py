"""MQAR and MQNAR: many keys, many queries in one sequence.

    N = 1    k1 v1 k2 v2 …            | q . q . .  q .        label at the query
    N = 2    a1 b1 v1 a2 b2 v2 …      | a b . . . . a b .     label at the query's last token

Keys are distinct N-grams of tokens 1..V/2−1, values distinct tokens of V/2..V−1, drawn for each
row. After the k·(N+1) tokens of context, the rest is cut into slots of N+1 tokens; each key is
asked once, in a slot drawn without replacement with p(slot g) ∝ g^(a−1), g = 1, 2, … . For N = 1
this is the multi-query task of Zoology (Arora et al., 2023) as its code of May 2024 draws it; CAT
takes k = L/4, where every slot is filled and the power law only orders the queries.

The paper does not say how the N-grams are drawn. Uniform tokens (`pool=none`) make two of them
share a token so seldom that matching one token nearly suffices; a small pool of tokens for each row
(`pool=6`, as in the paper's Table 1 with its (a b), (b a), (a a)) demands whole N-grams.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from cat_lm.labels import IGNORE_INDEX
from eval.recall.tasks.base import (
    Task,
    distinct,
    distinct_ngrams,
    unused,
    weighted_order,
)

FILLERS = {
    "unused": "any token but the row's own key tokens, so no query is asked by accident",
    "random": "any token, as Zoology's random_non_queries=True",
    "zeros": "token 0, as Zoology's random_non_queries=False",
}


@dataclass(frozen=True)
class MultiQueryRecall(Task):
    """Options of MQAR and MQNAR.

    Attributes:
        keys: k, key-value pairs in a row, each asked once; none: as many as fit,
            ⌊L/(2(N+1))⌋, which is the paper's L/4 for N = 1.
        ngram: N, tokens of a key.
        vocab_size: V. The paper says 8,092, most likely 8,192, which is Zoology's.
        pool: tokens that a row's keys are made of; none: all key tokens; auto: the least number
            whose N-grams are at least 3.5·k (6 for k = 10, N = 2).
        power_a: a of the power law.
        filler: what stands where nothing is said; see FILLERS.
    """

    keys: int | None = None
    ngram: int = 1
    vocab_size: int = 8192
    pool: int | str | None = None
    power_a: float = 0.01
    filler: str = "unused"

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ValueError(f"ngram={self.ngram}: must be at least 1")
        most = self.seq_len // (2 * (self.ngram + 1))
        if most < 1:
            raise ValueError(
                f"a {self.ngram}-gram, its value and its query need {2 * (self.ngram + 1)} "
                f"tokens; seq_len={self.seq_len} is too short"
            )
        if self.keys is not None and not 1 <= self.keys <= most:
            raise ValueError(f"keys={self.keys}: seq_len={self.seq_len} fits 1 to {most}")
        if self.filler not in FILLERS:
            raise ValueError(f"filler={self.filler!r}: choose one of {', '.join(FILLERS)}")
        if not 0 < self.power_a < math.inf:
            raise ValueError(f"power_a={self.power_a}: must be a number above 0")
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        tokens, values = self.key_tokens, self.vocab_size - self.vocab_size // 2
        if self.num_keys > values:
            raise ValueError(f"vocab_size={self.vocab_size}: {values} values, {self.num_keys} keys")
        if isinstance(self.pool, str) and self.pool != "auto":
            raise ValueError(f"pool={self.pool!r}: must be a whole number, auto or none")
        pool = self.pool_tokens
        if pool is not None and not 1 <= pool <= tokens:
            raise ValueError(f"pool={pool}: there are {tokens} key tokens")
        ngrams = (tokens if pool is None else pool) ** self.ngram
        if ngrams < self.num_keys:
            name = f"vocab_size={self.vocab_size}" if pool is None else f"pool={pool}"
            raise ValueError(f"{name}: {ngrams} {self.ngram}-grams, {self.num_keys} keys needed")

    @property
    def num_keys(self) -> int:
        return self.keys or self.seq_len // (2 * (self.ngram + 1))

    @property
    def key_tokens(self) -> int:
        """Number of tokens that keys may have: 1..V/2−1."""
        return self.vocab_size // 2 - 1

    @property
    def pool_tokens(self) -> int | None:
        if self.pool != "auto":
            return self.pool
        least = math.ceil((3.5 * self.num_keys) ** (1 / self.ngram) - 1e-9)
        return max(2, least)

    @property
    def vocabulary(self) -> int:
        return self.vocab_size

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def with_as_many_keys(self, seq_len: int) -> MultiQueryRecall:
        return dataclasses.replace(self, seq_len=seq_len, keys=self.num_keys)

    def at_length(self, seq_len: int) -> MultiQueryRecall:
        """k in proportion: as many as fit, or the same share of that."""
        if self.keys is None:
            return dataclasses.replace(self, seq_len=seq_len)
        keys = max(1, self.keys * seq_len // self.seq_len)
        return dataclasses.replace(self, seq_len=seq_len, keys=keys)

    def rows(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        k, n = self.num_keys, self.ngram
        width = n + 1
        keys = self._keys(rng, count)
        half = self.vocab_size // 2
        values = distinct(rng, count, k, half, self.vocab_size)
        inputs = np.zeros((count, self.seq_len), dtype=np.int64)
        labels = np.full((count, self.seq_len), IGNORE_INDEX, dtype=np.int64)
        given = np.zeros((count, self.seq_len), dtype=bool)
        context = np.concatenate([keys, values[:, :, None]], axis=2)
        inputs[:, : k * width] = context.reshape(count, k * width)
        given[:, : k * width] = True
        slots = (self.seq_len - k * width) // width
        weights = np.arange(1, slots + 1) ** (self.power_a - 1)
        first = k * width + width * weighted_order(rng, count, k, weights)
        for i in range(n):
            np.put_along_axis(inputs, first + i, keys[:, :, i], axis=1)
            np.put_along_axis(given, first + i, True, axis=1)
        np.put_along_axis(labels, first + n - 1, values, axis=1)
        self._fill(rng, inputs, given, keys)
        return inputs, labels

    def _keys(self, rng: np.random.Generator, count: int) -> np.ndarray:
        k, n, pool = self.num_keys, self.ngram, self.pool_tokens
        if pool is None:
            return distinct_ngrams(rng, count, k, n, self.key_tokens) + 1
        tokens = distinct(rng, count, pool, 1, self.key_tokens + 1)
        ngrams = distinct_ngrams(rng, count, k, n, pool).reshape(count, k * n)
        return np.take_along_axis(tokens, ngrams, axis=1).reshape(count, k, n)

    def _fill(
        self, rng: np.random.Generator, inputs: np.ndarray, given: np.ndarray, keys: np.ndarray
    ) -> None:
        """Writes the fillers into inputs [rows, T]."""
        if self.filler == "zeros":
            return
        if self.filler == "unused":
            taken = keys.reshape(len(keys), -1)
            drawn = unused(rng, inputs.shape, self.vocab_size, taken)
        else:
            drawn = rng.integers(0, self.vocab_size, inputs.shape)
        np.copyto(inputs, drawn, where=~given)
