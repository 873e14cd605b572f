"""Windows of a corpus: what one row of a batch holds.

A kind of windows has `corpus`, `num_windows`, `read(numbers, mask_documents)` and `describe()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.corpus import TokenCorpus, has_outside

Batch = dict[str, np.ndarray]


class Windows(Protocol):
    """`read` gives `input_ids`, `labels` and, if asked for, `document_ids`, each int64 [B, T]."""

    corpus: TokenCorpus
    num_windows: int

    def read(self, numbers: np.ndarray, mask_documents: bool) -> Batch: ...

    def describe(self) -> list[str]: ...


class StreamWindows:
    """The stream cut every `context_length` tokens, wherever documents begin and end.

    The tokens after the last whole window are not used. Raises `UserError` where the corpus is
    shorter than one window.
    """

    def __init__(self, corpus: TokenCorpus, context_length: int) -> None:
        self.corpus = corpus
        self.context_length = context_length
        # Each window needs one token more than it is long: the label of its last position.
        self.num_windows = (corpus.num_tokens - 1) // context_length
        if self.num_windows < 1:
            raise UserError(
                f"{corpus.name}: the {corpus.split} split has {corpus.num_tokens} tokens, "
                f"one window of context length {context_length} needs {context_length + 1}"
            )

    def read(self, numbers: np.ndarray, mask_documents: bool) -> Batch:
        return read_windows(self.corpus, numbers, self.context_length, mask_documents)

    def describe(self) -> list[str]:
        return []


class JoinedWindows:
    """The windows of several sources, numbered through: those of source i follow source i − 1's."""

    def __init__(self, sources: Sequence[Windows]) -> None:
        self._sources = sources
        self._ends = np.cumsum([source.num_windows for source in sources])
        self.num_windows = int(self._ends[-1])

    def read(self, numbers: np.ndarray, mask_documents: bool) -> Batch:
        owners = np.searchsorted(self._ends, numbers, side="right")
        first = self._ends - np.array([source.num_windows for source in self._sources])

        def read(owner: int, own_numbers: np.ndarray) -> Batch:
            return self._sources[owner].read(own_numbers, mask_documents)

        return scattered(owners, numbers - first[owners], read)

    def describe(self) -> list[str]:
        return [line for source in self._sources for line in source.describe()]


def scattered(
    owners: np.ndarray, numbers: np.ndarray, read: Callable[[int, np.ndarray], Batch]
) -> Batch:
    """One batch whose row i is window `numbers[i]` of source `owners[i]`.

    `read(owner, numbers)` gives the rows of one source.
    """
    batch: Batch = {}
    for owner in np.unique(owners):
        rows = np.flatnonzero(owners == owner)
        for key, values in read(int(owner), numbers[rows]).items():
            if key not in batch:
                batch[key] = np.empty((len(owners), *values.shape[1:]), values.dtype)
            batch[key][rows] = values
    return batch


def read_windows(
    corpus: TokenCorpus, windows: Sequence[int], context_length: int, mask_documents: bool
) -> Batch:
    """Windows of the stream as `input_ids`, `labels` and, if asked for, `document_ids`; [B, T].

    A window that runs past the end of the stream is padded with EOD and scored nowhere there.
    """
    starts = np.asarray(windows, dtype=np.int64) * context_length
    stops = np.minimum(starts + context_length + 1, corpus.num_tokens)
    input_ids = np.empty((len(starts), context_length), dtype=np.int64)
    labels = np.empty_like(input_ids)
    for row, tokens in enumerate(corpus.gather(starts, stops)):
        inputs, predicted = tokens[:context_length], tokens[1:]
        # Both are copied straight from the disk's dtype: there is no wider copy in between.
        input_ids[row, : len(inputs)], input_ids[row, len(inputs) :] = inputs, corpus.eod_id
        labels[row, : len(predicted)], labels[row, len(predicted) :] = predicted, IGNORE_INDEX
    batch = {"input_ids": input_ids, "labels": labels}
    check_batch(corpus, batch, starts, stops)
    if mask_documents:
        ends = input_ids == corpus.eod_id
        labels[ends] = IGNORE_INDEX
        # EOD belongs to the document that it ends, so the count is of the ends before a token.
        batch["document_ids"] = np.cumsum(ends, axis=1) - ends
    return batch


def check_batch(corpus: TokenCorpus, batch: Batch, starts: np.ndarray, stops: np.ndarray) -> None:
    """Check that a batch, read from tokens [start, stop), holds nothing but ids and `IGNORE_INDEX`.

    Raises:
        UserError: it does not; names the file and the place in it.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    wrong = has_outside(ids, corpus.vocab_size) or (labels >= corpus.vocab_size).any()
    if not wrong and corpus.has_signed_ids:
        wrong = ((labels < 0) & (labels != IGNORE_INDEX)).any()
    if wrong:
        corpus.name_outside(starts, stops)
