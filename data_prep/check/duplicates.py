"""Documents with exactly the same tokens: within train, within validation, and across the two.

Every document gets a 64-bit hash of its tokens, written to a scratch file (8 bytes a document).
The hashes are then gone through in parts of a size that fits into memory, sorted, and where some
agree the tokens themselves are compared: what is reported is equal, and nothing equal is missed.

For 600 million documents, 600 billion tokens: some hours of one core for hashing, which workers
divide, 4.8 GB of scratch, and minutes for the sorting in half a GB of memory; then two reads at
random places for each duplicate found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import SPLITS
from cat_lm.data.shards import Shard
from data_prep.check.integrity import BLOCK_TOKENS, document_ends, in_processes
from data_prep.common.progress import TextProgress

PART_DOCUMENTS = 1 << 23  # hashes in memory at a time, sorted together
CHUNK_HASHES = 1 << 20
EXAMPLES = 5  # of each kind


@dataclass
class Count:
    """Documents, and the tokens in them (EOD included)."""

    documents: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.documents += 1
        self.tokens += tokens


@dataclass
class Duplicates:
    """The duplicates that were found.

    `train`, `validation`: documents that repeat an earlier one of their own split; `across`:
    validation documents that are in train too. `examples`: of each the first few, by the documents'
    numbers in their splits.
    """

    train: Count = field(default_factory=Count)
    validation: Count = field(default_factory=Count)
    across: Count = field(default_factory=Count)
    examples: dict[str, list[dict]] = field(
        default_factory=lambda: {"train": [], "validation": [], "across": []}
    )

    def to_json(self) -> dict:
        return asdict(self)

    def fails(self, on: str) -> bool:
        """Return True if there are duplicates of the kind that --fail-on-duplicates names."""
        kinds = [self.across] if on == "across" else [self.across, self.train, self.validation]
        return any(kind.documents for kind in kinds)

    def add(self, kind: str, document: int, first: int, tokens: int) -> None:
        getattr(self, kind).add(tokens)
        pairs = self.examples[kind]
        pairs.append({"document": document, "same_as": first, "tokens": tokens})
        pairs.sort(key=lambda pair: pair["document"])
        del pairs[EXAMPLES:]


@dataclass(frozen=True)
class HashShard:
    """A worker's task: hash the documents of a shard into a file."""

    path: Path  # of the shard, without suffix
    out: Path

    def __call__(self) -> None:
        shard = Shard(self.path)
        ends = document_ends(shard)
        hashes = np.empty(len(ends), np.uint64)
        for first, stop in _blocks(ends):
            begin = int(ends[first - 1]) if first else 0
            data = memoryview(shard.read(begin, int(ends[stop - 1]))).cast("B")
            edges = (shard.dtype.itemsize * (ends[first:stop] - begin)).tolist()
            digests = [
                blake2b(data[start:end], digest_size=8).digest()
                for start, end in zip([0, *edges], edges, strict=False)
            ]
            hashes[first:stop] = np.frombuffer(b"".join(digests), np.uint64)
        hashes.tofile(self.out)


def _blocks(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of documents that have about `BLOCK_TOKENS` tokens, at least one document each."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, begin + BLOCK_TOKENS, side="right")))
        yield first, stop
        first = stop


def find_duplicates(
    corpora: dict[str, TokenCorpus], workers: int, scratch: Path | None
) -> Duplicates:
    """All documents that are exact copies of earlier ones; `workers` processes hash the shards.

    Documents are in the order train, validation, and of a group of copies the first counts as the
    original. Memory is bounded by `PART_DOCUMENTS`, whatever the number of documents.
    """
    shards = [shard for split in SPLITS for shard in corpora[split].shards]
    with tempfile.TemporaryDirectory(prefix="cat-lm-inspect-", dir=scratch) as folder:
        files = [Path(folder) / f"{number}" for number in range(len(shards))]
        tasks = [
            HashShard(shard.bin_path.with_suffix(""), file)
            for shard, file in zip(shards, files, strict=True)
        ]
        sizes = [shard.num_tokens * shard.dtype.itemsize for shard in shards]
        with TextProgress("hashing documents", sum(sizes), "of shards") as progress:
            for size, _ in zip(sizes, in_processes(tasks, sizes, workers), strict=True):
                progress.update(size)
        hashes = [np.memmap(file, np.uint64, "r") for file in files if file.stat().st_size]
        found = Duplicates()
        for group in _groups(hashes):
            _compare(corpora, group, found)
    return found


def _groups(hashes: list[np.ndarray]) -> Iterator[list[int]]:
    """Numbers of the documents whose hashes agree, each group in order."""
    documents = sum(map(len, hashes))
    parts = np.uint64(max(1, -(-documents // PART_DOCUMENTS)))
    for part in range(int(parts)):
        values, numbers = _of_part(hashes, np.uint64(part), parts)
        order = np.argsort(values, kind="stable")
        values, numbers = values[order], numbers[order]
        edges = np.flatnonzero(np.diff(values)) + 1  # where another hash begins
        starts, stops = np.append(0, edges), np.append(edges, len(values))
        several = np.flatnonzero(stops - starts > 1)
        for start, stop in zip(starts[several].tolist(), stops[several].tolist(), strict=True):
            yield numbers[start:stop].tolist()


def _of_part(
    hashes: list[np.ndarray], part: np.uint64, parts: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """The hashes that leave `part` when divided by `parts`, and their documents' numbers."""
    values, numbers, base = [], [], 0
    for array in hashes:
        for start in range(0, len(array), CHUNK_HASHES):
            chunk = np.asarray(array[start : start + CHUNK_HASHES])
            chosen = np.flatnonzero(chunk % parts == part)
            values.append(chunk[chosen])
            numbers.append(chosen + (base + start))
        base += len(array)
    if not values:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    return np.concatenate(values), np.concatenate(numbers)


def _compare(corpora: dict[str, TokenCorpus], group: list[int], found: Duplicates) -> None:
    """Compares the tokens of documents with one hash, and counts those that are equal."""
    train_documents = corpora["train"].num_documents
    # Of each distinct text its tokens, and its first document in either split.
    originals: list[tuple[np.ndarray, dict[str, int]]] = []
    for number in group:
        held_out = number >= train_documents
        split, document = (
            ("validation", number - train_documents) if held_out else ("train", number)
        )
        start, stop = corpora[split].document(document)
        tokens = corpora[split].gather([start], [stop])[0]
        same = (firsts for other, firsts in originals if np.array_equal(tokens, other))
        firsts = next(same, None)
        if firsts is None:
            originals.append((tokens, {split: document}))
            continue
        if split in firsts:
            found.add(split, document, firsts[split], len(tokens))
        firsts.setdefault(split, document)
        if held_out and "train" in firsts:
            found.add("across", document, firsts["train"], len(tokens))
