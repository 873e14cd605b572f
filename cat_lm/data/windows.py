"""Windows of a corpus: what one row of a batch holds.

A kind of windows has `corpus`, `num_windows`, `describe()` and `read(numbers, mask_documents)`,
which returns `input_ids`, `labels` and, if asked for, `document_ids`, each int64 [B, T].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.corpus import TokenCorpus

Batch = dict[str, np.ndarray]


class StreamWindows:
    """The stream cut every `context_length` tokens, wherever documents begin and end.

    The tokens after the last whole window are not used; with `keep_rest` they are one more window,
    padded with EOD and without labels there. Raises `UserError` where there is no window.
    """

    def __init__(self, corpus: TokenCorpus, context_length: int, keep_rest: bool = False) -> None:
        self.corpus = corpus
        self.context_length = context_length
        # Each window needs one token more than it is long: the label of its last position.
        self.num_windows = (corpus.num_tokens - 1) // context_length
        if keep_rest:
            self.num_windows = -(-(corpus.num_tokens - 1) // context_length)
        if self.num_windows < 1:
            raise UserError(
                f"{corpus.name}: the {corpus.split} split has {corpus.num_tokens} tokens, "
                f"one window of context length {context_length} needs "
                f"{2 if keep_rest else context_length + 1}"
            )

    def read(self, numbers: Sequence[int], mask_documents: bool) -> Batch:
        length, eod_id = self.context_length, self.corpus.eod_id
        starts = np.asarray(numbers, dtype=np.int64) * length
        stops = np.minimum(starts + length + 1, self.corpus.num_tokens)
        input_ids = np.empty((len(starts), length), dtype=np.int64)
        labels = np.empty_like(input_ids)
        for row, tokens in enumerate(self.corpus.gather(starts, stops)):
            inputs, predicted = tokens[:length], tokens[1:]
            # Both are copied straight from the disk's dtype: there is no wider copy in between.
            input_ids[row, : len(inputs)], input_ids[row, len(inputs) :] = inputs, eod_id
            labels[row, : len(predicted)], labels[row, len(predicted) :] = predicted, IGNORE_INDEX
        batch = {"input_ids": input_ids, "labels": labels}
        if mask_documents:
            ends = input_ids == eod_id
            labels[ends] = IGNORE_INDEX
            # EOD belongs to the document that it ends, so the count is of the ends before a token.
            batch["document_ids"] = np.cumsum(ends, axis=1) - ends
        return batch

    def describe(self) -> list[str]:
        return []


class JoinedWindows:
    """The windows of several sources, numbered through: those of source i follow source i − 1's."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = sources
        self.sizes = np.array([source.num_windows for source in sources])
        self._ends = np.cumsum(self.sizes)
        self.num_windows = int(self._ends[-1])

    def read(self, numbers: np.ndarray, mask_documents: bool) -> Batch:
        if len(self.sources) == 1:
            return self.sources[0].read(numbers, mask_documents)
        owners = np.searchsorted(self._ends, numbers, side="right")
        within = numbers - (self._ends - self.sizes)[owners]
        batch: Batch = {}
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            read = self.sources[owner].read(within[rows], mask_documents)
            for key, values in read.items():
                if key not in batch:
                    batch[key] = np.empty((len(owners), *values.shape[1:]), values.dtype)
                batch[key][rows] = values
        return batch

    def describe(self) -> list[str]:
        return [line for source in self.sources for line in source.describe()]
