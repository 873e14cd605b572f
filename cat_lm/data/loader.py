"""Batches as a pure function of (data, seed, step, rank, world size).

The stream of a split is cut into windows of `context_length` tokens; every epoch visits each window
once, in a new order. The order is computed, not stored: a keyed permutation of the window numbers,
so that opening at any step costs the same, and nothing is replayed. A global batch does not depend
on the number of ranks; rank r of w takes rows r·G/w … (r+1)·G/w − 1 of it.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cat_lm.data.corpus import TokenCorpus
from cat_lm.errors import UserError

IGNORE = -100
FEISTEL_ROUNDS = 8

Batch = dict[str, np.ndarray]


class Permutation:
    """A pseudo-random permutation of 0 … size − 1, computed point by point in O(1) memory.

    A balanced Feistel network over the smallest 4^k ≥ size; values that fall outside the range are
    encrypted again until they fall inside (cycle walking), which keeps it one-to-one.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Maps positions (integers in [0, size)) to the values they hold; int64, same shape."""
        values = self._encrypt(np.asarray(positions, dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TrainLoader:
    """Serves training batches of a corpus.

    Arguments: `context_length` T; `global_batch_size` G, windows in a step over all ranks; `seed`
    of the order; `mask_documents`, whether documents in a window are to be kept apart.
    `samples_per_epoch` windows make an epoch; the tokens after the last whole window are not used.
    Raises `UserError` where the corpus is shorter than one window.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        context_length: int,
        global_batch_size: int,
        seed: int,
        mask_documents: bool = False,
    ) -> None:
        if context_length < 1 or global_batch_size < 1:
            raise ValueError("context_length and global_batch_size must be at least 1")
        self.corpus = corpus
        self.context_length = context_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.mask_documents = mask_documents
        # Each window needs one token more than it is long: the label of its last position.
        self.samples_per_epoch = (corpus.num_tokens - 1) // context_length
        if self.samples_per_epoch < 1:
            raise UserError(
                f"{corpus.folder}: the {corpus.split} split has {corpus.num_tokens} tokens, "
                f"one window of context length {context_length} needs {context_length + 1}"
            )

    def sample_ids(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The windows that `rank` reads at `step` (counted from 0), int64 [G / world_size]."""
        rows = rows_of_rank(self.global_batch_size, rank, world_size)
        if step < 0:
            raise ValueError(f"step {step} is negative")
        first = step * self.global_batch_size
        # Plain integers: a global position may exceed 64 bits only in theory, but not its parts.
        epochs, positions = np.divmod(np.arange(first + rows.start, first + rows.stop), self._size)
        ids = np.empty(len(rows), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._order(int(epoch))(positions[here])
        return ids

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The batch of `rank` at `step` (counted from 0), int64 arrays [G / world_size, T].

        `input_ids`; `labels`, where labels[:, t] is the token after input_ids[:, t]; and, with
        `mask_documents`, `document_ids`, counted from 0 in each row, with the labels that would
        cross a document's end set to −100.
        """
        return read_windows(
            self.corpus,
            self.sample_ids(step, rank, world_size),
            self.context_length,
            self.mask_documents,
        )

    def prefetch(
        self, first_step: int, last_step: int, rank: int = 0, world_size: int = 1, depth: int = 4
    ) -> Prefetch:
        """The batches of steps first_step … last_step − 1, read ahead by a background thread."""
        return Prefetch(
            lambda step: self.batch(step, rank, world_size), range(first_step, last_step), depth
        )

    @property
    def _size(self) -> int:
        return self.samples_per_epoch

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self._size, f"{self.corpus.fingerprint} {self.seed} {epoch}")


def rows_of_rank(global_batch_size: int, rank: int, world_size: int) -> range:
    """The rows of a global batch that belong to `rank`."""
    if global_batch_size % world_size:
        raise UserError(
            f"a global batch of {global_batch_size} windows cannot be shared by {world_size} ranks"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    share = global_batch_size // world_size
    return range(rank * share, (rank + 1) * share)


def read_windows(
    corpus: TokenCorpus, windows: Sequence[int], context_length: int, mask_documents: bool
) -> Batch:
    """Windows of a corpus as `input_ids`, `labels` and, if asked for, `document_ids`; each [B, T].

    A window that runs past the end of the stream is padded with EOD and scored nowhere there.
    """
    shape = (len(windows), context_length)
    input_ids = np.full(shape, corpus.eod_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    for row, window in enumerate(windows):
        start = int(window) * context_length
        tokens = corpus.tokens(start, min(start + context_length + 1, corpus.num_tokens))
        inputs = tokens[:context_length]
        input_ids[row, : len(inputs)] = inputs
        labels[row, : len(tokens) - 1] = tokens[1:]
    batch = {"input_ids": input_ids, "labels": labels}
    if mask_documents:
        ends = input_ids == corpus.eod_id
        labels[ends] = IGNORE
        # EOD belongs to the document that it ends, so the count is of the ends before a token.
        batch["document_ids"] = np.cumsum(ends, axis=1) - ends
    return batch


class ValidationWindows(Sequence[Batch]):
    """All windows of a split in order: every token after the first is a label exactly once.

    `windows[i]` is a batch of one; `windows.batch(indices)` a batch of several. The last window is
    padded, with labels −100. With `mask_documents` first tokens of documents are not scored.
    """

    def __init__(self, corpus: TokenCorpus, context_length: int, mask_documents: bool) -> None:
        if corpus.num_tokens < 2:
            raise UserError(f"{corpus.folder}: the {corpus.split} split has no token to predict")
        self.corpus = corpus
        self.context_length = context_length
        self.mask_documents = mask_documents

    def __len__(self) -> int:
        return -(-(self.corpus.num_tokens - 1) // self.context_length)

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.batch([index % len(self)])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows `indices` in the layout of `TrainLoader.batch`, [len(indices), T]."""
        return read_windows(self.corpus, indices, self.context_length, self.mask_documents)


def validation_windows(
    corpus: TokenCorpus, context_length: int, mask_documents: bool = False
) -> ValidationWindows:
    """The windows that validation scores; rank r of w takes the windows r, r + w, r + 2w, …"""
    return ValidationWindows(corpus, context_length, mask_documents)


class Prefetch(Iterator[Batch]):
    """Calls `read(step)` for each step in a background thread, at most `depth` batches ahead.

    An error in the thread is raised where its batch would have come. `close()` (or leaving a `with`
    block) stops the thread and waits for it; dropping the object without closing it stops it too.
    """

    def __init__(self, read: Callable[[int], Batch], steps: range, depth: int = 4) -> None:
        self._ready: queue.Queue = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._done = False
        weakref.finalize(self, self._stop.set)
        self._thread = threading.Thread(
            target=_read_ahead,
            args=(read, steps, self._ready, self._stop),
            name="prefetch",
            daemon=True,
        )
        self._thread.start()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Batch:
        if self._done:
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "batch":
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stops reading ahead; iteration ends. May be called more than once."""
        self._done = True
        self._stop.set()
        self._thread.join()


def _read_ahead(
    read: Callable[[int], Batch], steps: range, ready: queue.Queue, stop: threading.Event
) -> None:
    def put(item: tuple) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    try:
        for step in steps:
            if not put(("batch", read(step))):
                return
        put(("end", None))
    except BaseException as error:
        put(("error", error))
