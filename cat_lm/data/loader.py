"""Batches as a pure function of (data, seed, step, rank, world size).

The data are cut into windows of `context_length` tokens: of the stream, or of whole documents
(`cat_lm.data.packing`). Every epoch visits each window once, in a new order
(`cat_lm.data.shuffle`), which is computed and not stored: starting at any step costs the same.
A global batch does not depend on the number of ranks w; rank r takes its sequences
r·G/w … (r+1)·G/w − 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.corpus import Mixture, TokenCorpus
from cat_lm.data.packing import PackedWindows
from cat_lm.data.shuffle import EpochOrder, MixtureOrder

Batch = dict[str, np.ndarray]


class StreamWindows:
    """Windows of the stream, cut every `context_length` tokens regardless of documents.

    Tokens after the last whole window are dropped. With `keep_rest` they form one more window,
    padded with EOD and without labels in the padding. Raises `UserError` if there is no window.
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
            # Assigning converts from the dtype on disk without another copy.
            input_ids[row, : len(inputs)], input_ids[row, len(inputs) :] = inputs, eod_id
            labels[row, : len(predicted)], labels[row, len(predicted) :] = predicted, IGNORE_INDEX
        batch = {"input_ids": input_ids, "labels": labels}
        if mask_documents:
            ends = input_ids == eod_id
            labels[ends] = IGNORE_INDEX
            # An EOD belongs to the document that it ends: count the EODs before each token.
            batch["document_ids"] = np.cumsum(ends, axis=1) - ends
        return batch


class JoinedWindows:
    """The windows of several sources, numbered consecutively from source to source."""

    def __init__(self, sources: Sequence[StreamWindows | PackedWindows]) -> None:
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


class TrainLoader:
    """Serves training batches of a corpus, or of a mixture of corpora.

    `samples_per_epoch` is the number of windows in an epoch, over all corpora of a mixture.

    Args:
        context_length: T, tokens per window.
        global_batch_size: G, windows per step over all ranks.
        seed: seed of the order.
        mask_documents: return document ids, so that attention stays within documents.
        packing: `stream`, T tokens of the stream regardless of documents, or `best_fit`, whole
            documents that fill T as well as possible.
        cache_dir: folder of packing plans that cannot be written beside the data.

    Raises:
        UserError: a corpus is shorter than one window.
    """

    def __init__(
        self,
        corpus: TokenCorpus | Mixture,
        context_length: int,
        global_batch_size: int,
        seed: int,
        mask_documents: bool = False,
        packing: str = "stream",
        cache_dir: str | None = None,
    ) -> None:
        if context_length < 1 or global_batch_size < 1:
            raise ValueError("context_length and global_batch_size must be at least 1")
        kinds = {"stream": StreamWindows, "best_fit": partial(PackedWindows, cache_dir=cache_dir)}
        if packing not in kinds:
            raise ValueError(f"packing {packing!r} is none of {', '.join(kinds)}")
        self.corpus = corpus
        self.context_length = context_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.mask_documents = mask_documents
        self._windows = JoinedWindows(
            [kinds[packing](part, context_length) for part in corpus.parts]
        )
        orders = [
            EpochOrder(source.num_windows, source.corpus.fingerprint, seed)
            for source in self._windows.sources
        ]
        self._order = orders[0]
        if isinstance(corpus, Mixture):
            self._order = MixtureOrder(orders, corpus.counts, f"{corpus.fingerprint} {seed}")
        self.samples_per_epoch = self._windows.num_windows

    def sample_ids(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Return the window numbers of `rank` at `step` (from 0), int64 [G / world_size]."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        rows = sequences_of_rank(self.global_batch_size, rank, world_size)
        first = step * self.global_batch_size
        return self._order(np.arange(first + rows.start, first + rows.stop))

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the batch of `rank` at `step` (from 0), int64 arrays [G / world_size, T].

        `labels[:, t]` is the token after `input_ids[:, t]`, or −100 where no token is to be
        predicted. With `mask_documents` there are also `document_ids`, counted from 0 in each
        sequence, and the last label of each document is −100.
        """
        numbers = self.sample_ids(step, rank, world_size)
        return self._windows.read(numbers, self.mask_documents)

    def describe(self, steps: int) -> list[str]:
        """Return lines for the log about the data, and the mixture over this number of steps."""
        lines = self.corpus.describe()
        for source in self._windows.sources:
            if isinstance(source, PackedWindows):
                lines += source.describe()
        if isinstance(self.corpus, Mixture):
            planned = self._order.count_draws(steps * self.global_batch_size)
            lines += self.corpus.describe_draws(self._windows.sizes, planned)
        return lines

    def prefetch(
        self, first_step: int, last_step: int, rank: int = 0, world_size: int = 1, depth: int = 4
    ) -> Generator[Batch, None, None]:
        """Yield the batches of steps first_step … last_step − 1; a thread reads `depth` ahead.

        An error in the thread is raised in place of its batch. Closing or dropping the generator
        ends the thread.
        """
        steps = iter(range(first_step, last_step))
        ready: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
            try:
                while True:
                    for step in islice(steps, depth + 1 - len(ready)):
                        ready.append(thread.submit(self.batch, step, rank, world_size))
                    if not ready:
                        return
                    yield ready.popleft().result()
            finally:
                for batch in ready:
                    batch.cancel()


def sequences_of_rank(global_batch_size: int, rank: int, world_size: int) -> range:
    """Return the range of the sequences of a global batch that belong to `rank`."""
    if global_batch_size % world_size:
        raise UserError(
            f"a global batch of {global_batch_size} windows cannot be shared by {world_size} ranks"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    share = global_batch_size // world_size
    return range(rank * share, (rank + 1) * share)


class ValidationWindows:
    """All windows of a split, in which every token but a corpus's first is a label exactly once.

    The last window is padded, with labels −100. With `mask_documents` the first tokens of documents
    are not scored. The windows of one corpus come in order. Those of a mixture are interleaved, so
    that the first n windows hold each corpus in its proportion. Rank r of w takes the windows
    r, r + w, r + 2w, …
    """

    def __init__(
        self, corpus: TokenCorpus | Mixture, context_length: int, mask_documents: bool = False
    ) -> None:
        self.corpus = corpus
        self.context_length = context_length
        self.mask_documents = mask_documents
        self._windows = JoinedWindows(
            [StreamWindows(part, context_length, keep_rest=True) for part in corpus.parts]
        )
        places = [(np.arange(size) + 0.5) / size for size in self._windows.sizes]
        self._order = np.argsort(np.concatenate(places), kind="stable")

    def __len__(self) -> int:
        return self._windows.num_windows

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the windows `indices` in the layout of `TrainLoader.batch`, [len(indices), T]."""
        numbers = self._order[np.asarray(indices, dtype=np.int64)]
        return self._windows.read(numbers, self.mask_documents)
