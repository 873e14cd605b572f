"""Documents to tokens in worker processes, in an order that does not depend on their number."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo
from cat_lm.errors import UserError
from data_prep.documents import Document

CHUNK_BYTES = 1 << 20
CHUNK_DOCUMENTS = 1000
MAX_DOCUMENT = 1 << 26  # characters; encoding takes some 70 bytes of memory for each


@dataclass(frozen=True)
class Plan:
    """What a worker needs to know: the tokenizer's folder, and how documents are split."""

    tokenizer_folder: Path
    tokenizer: TokenizerInfo
    dtype: np.dtype
    seed: int
    validation_fraction: float


def split_of(document: Document, seed: int, validation_fraction: float) -> str:
    """The split of a document: its own, or else decided by a hash of the seed and the text.

    So a document and its exact copies fall on one side, whatever the order of the input.
    """
    if document.split:
        return document.split
    return "validation" if place_of(document, seed) < validation_fraction else "train"


def place_of(document: Document, seed: int) -> float:
    """Where the hash of the seed and the text puts a document: uniform in [0, 1)."""
    text = document.text.encode()
    digest = hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") / 2**64


@dataclass
class Encoded:
    """The documents of a chunk that belong to one split, in order."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray
    sets: dict[str, Counter] = field(default_factory=dict)


@dataclass
class EncodedChunk:
    """A worker's answer for a chunk of documents."""

    splits: dict[str, Encoded]
    empty: int
    text_bytes: int


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups documents into chunks of bounded size, the unit of work."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        if len(document.text) > MAX_DOCUMENT:
            raise UserError(
                f"a document of {len(document.text) / 1e6:.0f} million characters (it begins "
                f"{document.text[:40]!r}) is too large to encode, {MAX_DOCUMENT / 1e6:.0f} million "
                "is the most; cut a text file into documents with --document-separator"
            )
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class ChunkEncoder:
    """Encodes chunks by the plan; one in each worker process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.encoder = DocumentEncoder(
            plan.tokenizer_folder, plan.tokenizer.eod_id, plan.tokenizer.vocab_size
        )

    def __call__(self, chunk: list[Document]) -> EncodedChunk:
        seed, fraction = self.plan.seed, self.plan.validation_fraction
        by_split: dict[str, list[Document]] = {}
        for document in chunk:
            if document.text:
                by_split.setdefault(split_of(document, seed, fraction), []).append(document)
        splits = {split: self._encode(documents) for split, documents in by_split.items()}
        return EncodedChunk(
            splits=splits,
            empty=sum(not document.text for document in chunk),
            text_bytes=sum(int(encoded.text_bytes.sum()) for encoded in splits.values()),
        )

    def _encode(self, documents: list[Document]) -> Encoded:
        texts = [document.text for document in documents]
        sizes = [len(text.encode()) for text in texts]
        tokens, lengths = self.encoder.encode_documents(texts, self.plan.dtype)
        sets: dict[str, Counter] = {}
        for document, length, size in zip(documents, lengths.tolist(), sizes, strict=True):
            counts = sets.setdefault(document.set, Counter())
            counts.update(documents=1, tokens=length, bytes=size)
        return Encoded(tokens, lengths, np.array(sizes, dtype=np.int64), sets)


def encode_documents(
    documents: Iterable[Document], plan: Plan, workers: int
) -> Iterator[EncodedChunk]:
    """Encodes documents in `workers` processes; the results come in the documents' order.

    At most a few chunks per worker are in memory, however long the input is.
    """
    if workers == 1:
        yield from map(ChunkEncoder(plan), chunks(documents))
        return
    pending: deque = deque()
    # "spawn" rather than "fork": the tokenizers' threads do not survive a fork.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (plan,)
    )
    try:
        for chunk in chunks(documents):
            pending.append(pool.submit(_encode_chunk, chunk))
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process died, most likely for want of memory; use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: ChunkEncoder | None = None


def _start_worker(plan: Plan) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    # The processes share the cores; threads in each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = ChunkEncoder(plan)


def _end_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_chunk(chunk: list[Document]) -> EncodedChunk:
    return _worker(chunk)
