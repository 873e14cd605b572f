"""Split the tokens of a text by whether a window shows what comes next.

At input i of a window the model predicts token i+1. The window *hits* where the two tokens
(i, i+1) stand side by side earlier in it, so that the next one could be looked up. How often the
pair stands in the training text says how much of it could be known by heart: hits of rare pairs
are the "associative recall hits" of Arora et al., 2023 (arXiv:2312.04927), all other tokens the
rest. Windows are those of eval.length_sweep, moved on by half their length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cat_lm.data.corpus import TokenCorpus
    from eval.length_sweep.perplexity import Window

RARE = 3  # times in training, at most, that a pair stands whose hits are recall
EDGES = (0, 1, RARE + 1, 16, 64)  # the least count of each bin
PRIOR = 16.0  # tokens that the unigram model counts for in the bigram model
_CHUNK = 1 << 22


def _named(low: int, high: int) -> str:
    return f"{low}–{high - 1}" if high - 1 > low else str(low)


BINS = (*(_named(*edges) for edges in pairwise(EDGES)), f"{EDGES[-1]}+")
RECALL, REST, LAST = "recall", "rest", "last"
SLICES = (*BINS, RECALL, REST, LAST)


@dataclass(frozen=True)
class Counts:
    """What a training text says of the pairs of another text.

    Attributes:
        pairs: [N] how often each pair stands in training.
        first: [N] how often its first token does, as the first of a pair.
        second: [N] how often its second token does.
        total, vocabulary: tokens of the training text, and different ones that there are.
    """

    pairs: np.ndarray
    first: np.ndarray
    second: np.ndarray
    total: int
    vocabulary: int

    def bigram_nlls(self) -> np.ndarray:
        """Nats of each pair's second token under counts, the unigram model as a prior."""
        unigram = (self.second + 1) / (self.total + self.vocabulary)
        return -np.log((self.pairs + PRIOR * unigram) / (self.first + PRIOR))


def pair_keys(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """One number for each pair of neighbours: int64 [N−1]."""
    return tokens[:-1].astype(np.int64) * vocabulary + tokens[1:]


def count_pairs(tokens: np.ndarray, chunks: Iterable[np.ndarray], vocabulary: int) -> Counts:
    """Count the pairs of `tokens` in a training text.

    Args:
        tokens: int64 [N+1].
        chunks: the training text in parts, each of which begins with the last token of the one
            before.
    """
    wanted, index = np.unique(pair_keys(tokens, vocabulary), return_inverse=True)
    found = np.zeros(len(wanted), np.int64)
    firsts, seconds = np.zeros(vocabulary, np.int64), np.zeros(vocabulary, np.int64)
    total = 0
    for chunk in chunks:
        keys = pair_keys(chunk, vocabulary)
        place = np.searchsorted(wanted, keys).clip(max=len(wanted) - 1)
        found += np.bincount(place[wanted[place] == keys], minlength=len(wanted))
        firsts += np.bincount(chunk[:-1], minlength=vocabulary)
        seconds += np.bincount(chunk[1:], minlength=vocabulary)
        total += len(keys)
    return Counts(found[index], firsts[tokens[:-1]], seconds[tokens[1:]], total, vocabulary)


def overlapping(corpus: TokenCorpus) -> Iterator[np.ndarray]:
    """A corpus's tokens in parts, each of which begins with the last of the one before."""
    for start in range(0, corpus.num_tokens - 1, _CHUNK):
        yield corpus.tokens(start, min(start + _CHUNK + 1, corpus.num_tokens))


def previous(keys: np.ndarray) -> np.ndarray:
    """The last place before each one with the same key, −1 where there is none: int64 [N]."""
    order = np.argsort(keys, kind="stable")
    found = np.full(len(keys), -1, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    found[order[1:][same]] = order[:-1][same]
    return found


def slices(
    tokens: np.ndarray, windows: Sequence[Window], counts: np.ndarray, vocabulary: int
) -> dict[str, np.ndarray]:
    """Which predictions are in each of `SLICES`: name -> bool [N].

    Args:
        tokens: int64 [N+1].
        windows: those that score them; a prediction that none scores is in no slice.
        counts: [N] of each pair in training.

    Returns:
        Hits by bins of their count, hits of rare pairs, all that is scored but those, and hits
        where the last earlier place of the first token had the second one after it.
    """
    keys = pair_keys(tokens, vocabulary)
    start = np.full(len(keys), -1, np.int64)
    for window in windows:
        start[window.first : window.stop] = window.start
    scored = start >= 0
    before = previous(keys)
    hit = scored & (before >= start)
    which = np.searchsorted(EDGES, counts, side="right") - 1
    found = {name: hit & (which == number) for number, name in enumerate(BINS)}
    found[RECALL] = hit & (counts <= RARE)
    found[REST] = scored & ~found[RECALL]
    found[LAST] = hit & (before == previous(tokens[:-1]))
    return found
