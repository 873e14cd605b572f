"""Split the tokens of a text by whether a window shows what comes next, and score each part.

At input i of a window the model predicts token i+1. The window *hits* where the two tokens
(i, i+1) stand side by side earlier in it, so that the next one could be looked up. How often the
pair stands in the training text says how much of it could be known by heart: hits of rare pairs
are the "associative recall hits" of Arora et al., 2023 (arXiv:2312.04927), all other tokens the
rest. Windows are those of eval.length_sweep, moved on by half their length; a bigram model of
counts, which cannot recall, is scored on the same parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cat_lm.core.files import replace_nonfinite
from eval.length_sweep.perplexity import Window, document_spans, span_windows, token_nlls
from eval.length_sweep.token_stream import Documents, TokenStream, split_stream

if TYPE_CHECKING:
    from cat_lm.data.corpus import TokenCorpus

# A pair with more occurrences in training is not rare; hits of rare pairs count as recall.
RARE = 3
EDGES = (0, 1, RARE + 1, 16, 64)  # The least count of each bin.
PRIOR = 16.0  # The weight, in tokens, of the unigram prior in the bigram model.
_CHUNK = 1 << 22
_BATCH_TOKENS = 8192


def _named(low: int, high: int) -> str:
    return f"{low}–{high - 1}" if high - 1 > low else str(low)


BINS = (*(_named(*edges) for edges in pairwise(EDGES)), f"{EDGES[-1]}+")
RECALL, REST, LAST = "recall", "rest", "last"
SLICES = (*BINS, RECALL, REST, LAST)


@dataclass(frozen=True)
class Counts:
    """Counts, in a training text, of the pairs of another text.

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
        """Return the nats of each pair's second token under a bigram model with a unigram prior."""
        unigram = (self.second + 1) / (self.total + self.vocabulary)
        return -np.log((self.pairs + PRIOR * unigram) / (self.first + PRIOR))


def _pair_keys(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * vocabulary + tokens[1:]


def count_pairs(tokens: np.ndarray, chunks: Iterable[np.ndarray], vocabulary: int) -> Counts:
    """Count the pairs of `tokens` in a training text.

    Args:
        tokens: int64 [N+1].
        chunks: the training text in parts, each of which begins with the last token of the one
            before.
    """
    wanted, index = np.unique(_pair_keys(tokens, vocabulary), return_inverse=True)
    found = np.zeros(len(wanted), np.int64)
    firsts, seconds = np.zeros(vocabulary, np.int64), np.zeros(vocabulary, np.int64)
    total = 0
    for chunk in chunks:
        keys = _pair_keys(chunk, vocabulary)
        place = np.searchsorted(wanted, keys).clip(max=len(wanted) - 1)
        found += np.bincount(place[wanted[place] == keys], minlength=len(wanted))
        firsts += np.bincount(chunk[:-1], minlength=vocabulary)
        seconds += np.bincount(chunk[1:], minlength=vocabulary)
        total += len(keys)
    return Counts(found[index], firsts[tokens[:-1]], seconds[tokens[1:]], total, vocabulary)


def overlapping(corpus: TokenCorpus) -> Iterator[np.ndarray]:
    """Yield a corpus's tokens in chunks that overlap by one token."""
    for start in range(0, corpus.num_tokens - 1, _CHUNK):
        yield corpus.tokens(start, min(start + _CHUNK + 1, corpus.num_tokens))


def _previous(keys: np.ndarray) -> np.ndarray:
    """Return the index of the previous equal key, −1 without one: int64 [N]."""
    order = np.argsort(keys, kind="stable")
    found = np.full(len(keys), -1, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    found[order[1:][same]] = order[:-1][same]
    return found


def assign_slices(
    tokens: np.ndarray, windows: Sequence[Window], counts: np.ndarray, vocabulary: int
) -> dict[str, np.ndarray]:
    """Return name -> bool [N] for `SLICES`: which predictions are in each.

    Args:
        tokens: int64 [N+1].
        windows: those that score them; a prediction that none scores is in no slice.
        counts: [N] of each pair in training.

    Returns:
        Hits by bins of their count, hits of rare pairs, all that is scored but those, and hits
        where the last earlier place of the first token had the second one after it.
    """
    keys = _pair_keys(tokens, vocabulary)
    start = np.full(len(keys), -1, np.int64)
    for window in windows:
        start[window.first : window.stop] = window.start
    scored = start >= 0
    before = _previous(keys)
    hit = scored & (before >= start)
    which = np.searchsorted(EDGES, counts, side="right") - 1
    found = {name: hit & (which == number) for number, name in enumerate(BINS)}
    found[RECALL] = hit & (counts <= RARE)
    found[REST] = scored & ~found[RECALL]
    found[LAST] = hit & (before == _previous(tokens[:-1]))
    return found


@functools.cache
def _text(
    data: Path, documents: int, longest: int, skip_tokens: int
) -> tuple[TokenStream, Counts, list[tuple[int, int]]]:
    """Return the documents that a sweep with the same arguments scores, with counts and spans."""
    from cat_lm.data.opening import open_verified
    from cat_lm.pretrained.loading import load_tokenizer

    choice = Documents(at_least=longest, at_most=longest)
    tokenizer = load_tokenizer(data / "tokenizer")
    stream = split_stream(data, tokenizer, documents * longest, choice, skip_tokens=skip_tokens)
    train = open_verified(data, "train")
    counts = count_pairs(stream.tokens, overlapping(train), train.vocab_size)
    return stream, counts, list(stream.spans or document_spans(stream.tokens, stream.eod_id))


def score_recalled(
    folder: Path,
    dtype: str,
    device: str,
    data: Path,
    documents: int,
    longest: int,
    length: int,
    skip: int,
) -> dict[str, dict[str, Any]]:
    """Score a model separately on tokens that it can recall, on a sweep's documents.

    Args:
        folder: the exported model, which computes in `dtype` on `device`.
        data: prepared data; the validation split is scored, and pairs are counted in train.
        documents: number of documents to score.
        longest: their minimum number of tokens, up to which each is scored.
        length: tokens per window.
        skip: number of tokens at the beginning in which no scored document begins.

    Returns:
        For each slice the loss (None if it is empty or not finite), the loss of a bigram count
        model, and the tokens and nats of each document.
    """
    from cat_lm.pretrained.loading import load_model

    stream, counts, spans = _text(data, documents, longest, skip)
    stride = max(1, length // 2)
    windows = [window for span in spans for window in span_windows(*span, length, stride)]
    model = load_model(folder, dtype=dtype, device=device)
    nlls = token_nlls(model, stream.tokens, windows, batch_tokens=_BATCH_TOKENS)
    parts = assign_slices(stream.tokens, windows, counts.pairs, counts.vocabulary)
    bigrams = counts.bigram_nlls()
    return {
        name: {
            "counts": _over_documents(parts[name], bigrams, spans)["loss"],
            **_over_documents(parts[name], nlls, spans),
        }
        for name in SLICES
    }


def _over_documents(
    part: np.ndarray, nlls: np.ndarray, spans: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    values = np.where(part, nlls, 0.0).astype(np.float64)
    sums = [float(values[start:stop].sum()) for start, stop in spans]
    sizes = [int(part[start:stop].sum()) for start, stop in spans]
    is_whole = all(map(math.isfinite, sums)) and sum(sizes) > 0
    return replace_nonfinite(
        {
            "loss": math.fsum(sums) / sum(sizes) if is_whole else None,
            "documents": {"tokens": sizes, "nats": sums if is_whole else None},
        }
    )
