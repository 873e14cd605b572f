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
(`pool=6`, as in the paper's Table 1 with its (a b), (b a), (a a)) demands whole N-grams. How far
one token goes is told by `one_token`, and accuracy apart for queries whose last token another key
has too.

Definition 5 also has queries without a match, which must be answered with a special token:
`unmatched` of them are asked in each row, and the token after the vocabulary is their answer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers.parts.base import check_choice, check_counts, check_positive
from eval.recall.tasks.base import (
    Examples,
    Task,
    distinct_ngrams,
    draw_distinct,
    draw_unused,
    require,
    weighted_order,
)

FILLERS = {
    "unused": "any token but the row's own key tokens, so no query is asked by accident",
    "random": "any token, as Zoology's random_non_queries=True",
    "zeros": "token 0, as Zoology's random_non_queries=False",
}
# Least number of N-grams of a pool, for each N-gram of a row. Of `dense`, a bigram's last token
# alone is right in less than 0.6 from five keys on.
POOLS = {"auto": 3.5, "dense": 1.8}


@dataclass(frozen=True)
class MultiQueryRecall(Task):
    """Options of MQAR and MQNAR.

    Attributes:
        keys: k, key-value pairs in a row, each asked once; none: as many as fit,
            ⌊L/(2(N+1))⌋ if all have a match, which is the paper's L/4 for N = 1.
        ngram: N, tokens of a key.
        vocab_size: V. The paper says 8,092, most likely 8,192, which is Zoology's.
        pool: tokens that a row's keys are made of; none: all key tokens; auto, dense: the least
            number whose N-grams are at least 3.5 and 1.8 times the row's (6 and 5 for 10, N = 2).
        power_a: a of the power law.
        filler: tokens between the pairs and queries; see FILLERS.
        unmatched: queries of a row without a match, beside the k that have one.
    """

    keys: int | None = None
    ngram: int = 1
    vocab_size: int = 8192
    pool: int | str | None = None
    power_a: float = 0.01
    filler: str = "unused"
    unmatched: int = 0

    def __post_init__(self) -> None:
        n, unmatched, length = self.ngram, self.unmatched, self.seq_len
        check_counts(self, "ngram")
        require(unmatched >= 0, f"unmatched={unmatched}: must be at least 0")
        most = self._most_keys
        others = f" and {unmatched} queries without a match" if unmatched else ""
        require(
            most >= 1,
            f"a {n}-gram, its value and its query{others} need {(2 + unmatched) * (n + 1)} tokens; "
            f"seq_len={length} is too short",
        )
        fits = self.keys is None or 1 <= self.keys <= most
        require(fits, f"keys={self.keys}: seq_len={length} fits 1 to {most}")
        check_choice(self, "filler", tuple(FILLERS))
        check_positive(self, "power_a")
        tokens, values = self.key_tokens, self.vocab_size - self.vocab_size // 2
        said = f"vocab_size={self.vocab_size}"
        require(self.num_keys <= values, f"{said}: {values} values, {self.num_keys} keys")
        known = f"must be a whole number, {', '.join(POOLS)} or none"
        is_pool = not isinstance(self.pool, str) or self.pool in POOLS
        require(is_pool, f"pool={self.pool!r}: {known}")
        if (pool := self.pool_tokens) is not None:
            require(1 <= pool <= tokens, f"pool={pool}: there are {tokens} key tokens")
            tokens, said = pool, f"pool={pool}"
        ngrams = tokens**self.ngram
        needed = f"{ngrams} {self.ngram}-grams, {self.queries} keys needed"
        require(ngrams >= self.queries, f"{said}: {needed}")

    @property
    def _most_keys(self) -> int:
        return (self.seq_len // (self.ngram + 1) - self.unmatched) // 2

    @property
    def num_keys(self) -> int:
        return self.keys or self._most_keys

    @property
    def queries(self) -> int:
        """Return the number of queries in a row, including unmatched ones."""
        return self.num_keys + self.unmatched

    @property
    def key_tokens(self) -> int:
        """Return the number of tokens that keys may have: 1..V/2−1."""
        return self.vocab_size // 2 - 1

    @property
    def pool_tokens(self) -> int | None:
        if self.pool not in POOLS:
            return self.pool
        least = math.ceil((POOLS[self.pool] * self.queries) ** (1 / self.ngram) - 1e-9)
        return max(2, least)

    @property
    def vocabulary(self) -> int:
        return self.vocab_size + (self.unmatched > 0)

    @property
    def chance(self) -> float:
        values = self.vocab_size - self.vocab_size // 2
        return max(self.num_keys / values, self.unmatched) / self.queries

    def with_as_many_keys(self, seq_len: int) -> MultiQueryRecall:
        return dataclasses.replace(self, seq_len=seq_len, keys=self.num_keys)

    def at_length(self, seq_len: int) -> MultiQueryRecall:
        """Return the task with a proportional number of keys and unmatched queries."""

        def scaled(count: int) -> int:
            return max(1, count * seq_len // self.seq_len)

        keys = None if self.keys is None else scaled(self.keys)
        unmatched = scaled(self.unmatched) if self.unmatched else 0
        return dataclasses.replace(self, seq_len=seq_len, keys=keys, unmatched=unmatched)

    def groups(self, inputs: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return masks of the queries by group: `shared` if another key has the same last token,
        else `unshared`; and `matched` or `unmatched`, if the task has queries without a match.
        """
        found: dict[str, np.ndarray] = {}
        sharing, matched = self._sharing(inputs, labels)
        if self.ngram > 1:
            shared = sharing > matched
            found |= {"shared": shared, "unshared": ~shared}
        if self.unmatched:
            found |= {"matched": matched, "unmatched": ~matched}
        return found

    def one_token(self, examples: Examples) -> dict[str, float]:
        """Return the accuracy of the best answers from a query's last token alone.

        A query whose last token m keys have is answered with one of their m values, or, where that
        is more often right, with the token for no match.

        Returns:
            `one_token_ceiling`, on these rows; `one_token_expected`, its mean over all rows (where
            every query has a match); nothing for N = 1, where one token is all.
        """
        if self.ngram == 1:
            return {}
        sharing, matched = self._sharing(examples.inputs, examples.labels)
        right = 0.0
        for m in np.unique(sharing):
            of_m = matched[sharing == m]
            right += max(of_m.sum() / max(m, 1), (~of_m).sum())
        found = {"one_token_ceiling": float(right / sharing.size)}
        if not self.unmatched:
            found["one_token_expected"] = self.one_token_expected
        return found

    @property
    def one_token_expected(self) -> float:
        """n/k·(1 − C(n^N − n^(N−1), k)/C(n^N, k)) for k distinct N-grams of n tokens.

        In a row, one of the keys that share a last token is answered rightly by chance: the
        accuracy is the number of different last tokens over k, and a token is none of them in that
        share of all choices.
        """
        k, n = self.num_keys, self.pool_tokens or self.key_tokens
        every = n**self.ngram
        absent = math.comb(every - every // n, k) / math.comb(every, k)
        return n / k * (1 - absent)

    def _sharing(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each query [rows, n], how many keys share its last token, and whether it has
        a match.
        """
        scored = labels != IGNORE_INDEX
        width, shape = self.ngram + 1, (len(inputs), self.queries)
        last = inputs[:, self.ngram - 1 : self.num_keys * width : width]
        asked = inputs[scored].reshape(shape)
        sharing = (asked[:, :, None] == last[:, None, :]).sum(axis=2)
        return sharing, labels[scored].reshape(shape) != self.vocab_size

    def rows(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        k, n = self.num_keys, self.ngram
        width = n + 1
        keys = self._keys(rng, count)  # The last keys are asked for, but are not in the context.
        half = self.vocab_size // 2
        values = draw_distinct(rng, count, k, half, self.vocab_size)
        inputs = np.zeros((count, self.seq_len), dtype=np.int64)
        labels = np.full((count, self.seq_len), IGNORE_INDEX, dtype=np.int64)
        given = np.zeros((count, self.seq_len), dtype=bool)
        context = np.concatenate([keys[:, :k], values[:, :, None]], axis=2)
        inputs[:, : k * width] = context.reshape(count, k * width)
        given[:, : k * width] = True
        slots = (self.seq_len - k * width) // width
        weights = np.arange(1, slots + 1) ** (self.power_a - 1)
        first = k * width + width * weighted_order(rng, count, self.queries, weights)
        for i in range(n):
            np.put_along_axis(inputs, first + i, keys[:, :, i], axis=1)
            np.put_along_axis(given, first + i, True, axis=1)
        answers = np.pad(values, ((0, 0), (0, self.unmatched)), constant_values=self.vocab_size)
        np.put_along_axis(labels, first + n - 1, answers, axis=1)
        if self.filler == "unused":
            drawn = draw_unused(rng, inputs.shape, self.vocab_size, keys.reshape(count, -1))
            np.copyto(inputs, drawn, where=~given)
        elif self.filler == "random":
            np.copyto(inputs, rng.integers(0, self.vocab_size, inputs.shape), where=~given)
        return inputs, labels

    def _keys(self, rng: np.random.Generator, count: int) -> np.ndarray:
        k, n, pool = self.queries, self.ngram, self.pool_tokens
        if pool is None:
            return distinct_ngrams(rng, count, k, n, self.key_tokens) + 1
        tokens = draw_distinct(rng, count, pool, 1, self.key_tokens + 1)
        ngrams = distinct_ngrams(rng, count, k, n, pool).reshape(count, k * n)
        return np.take_along_axis(tokens, ngrams, axis=1).reshape(count, k, n)
