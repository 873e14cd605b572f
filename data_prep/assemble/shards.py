"""Plan the final shards, and write them from parts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from cat_lm.data.shards import ShardInfo, ShardWriter, index_bytes
from cat_lm.data.verified import note_files, shard_digests
from data_prep.assemble.selection import Selection
from data_prep.encode.parts import Parts, disk_errors, load_record, part_path, write_record

ASSEMBLY = "assembly.json"
BLOCK_TOKENS = 1 << 22
# The validation split comes first: it is small and reads all parts, which train then frees.
ORDER = ("validation", "train")


@dataclass
class PlannedShard:
    """The plan of a shard: its name, its counts, and its pieces.

    A piece is (pass, unit, first document, number of documents), where documents are counted among
    those that the pass selects from the unit.
    """

    split: str
    number: int
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"

    @property
    def units(self) -> set[int]:
        return {unit for _, unit, _, _ in self.pieces}


def plan_shards(
    parts: Parts, selection: Selection, shard_tokens: int
) -> tuple[list[PlannedShard], dict[str, dict[str, Counter]]]:
    """Return all shards in the order of writing, and the counts by set and split.

    A shard is filled with documents in order until the next one would exceed `shard_tokens`. A
    larger document has a shard of its own.
    """
    shards: list[PlannedShard] = []
    counts: dict[str, dict[str, Counter]] = {}
    for split in ORDER:
        made: list[PlannedShard] = []
        for number in range(selection.passes if split == "train" else 1):
            for unit, documents in parts.scan():
                taken = selection.select_indices(
                    documents, unit, parts.unit_splits[unit], split, number
                )
                _append_documents(made, split, number, unit, documents[taken], shard_tokens)
                _add_counts(counts, parts.names, split, documents[taken])
        shards += made
    return shards, counts


def _append_documents(
    shards: list[PlannedShard],
    split: str,
    number: int,
    unit: int,
    documents: np.ndarray,
    shard_tokens: int,
) -> None:
    """Append the documents that a pass selects from a unit to the last shard and to new ones."""
    ends = np.cumsum(documents["length"], dtype=np.int64)
    first = 0
    while first < len(documents):
        before = int(ends[first - 1]) if first else 0
        left = shard_tokens - shards[-1].tokens if shards else 0
        stop = int(np.searchsorted(ends, before + left, side="right"))
        if stop <= first:
            shards.append(PlannedShard(split, len(shards)))
            stop = max(first + 1, int(np.searchsorted(ends, before + shard_tokens, side="right")))
        shard, some = shards[-1], documents[first:stop]
        shard.pieces.append((number, unit, first, len(some)))
        for name, size in _sum_sizes(some).items():
            setattr(shard, name, getattr(shard, name) + size)
        first = stop


def _add_counts(counts: dict, names: list[str], split: str, documents: np.ndarray) -> None:
    for index in np.unique(documents["set"]).tolist():
        found = counts.setdefault(names[index], {}).setdefault(split, Counter())
        found.update(_sum_sizes(documents[documents["set"] == index]))


def _sum_sizes(documents: np.ndarray) -> dict[str, int]:
    tokens, size = (int(documents[key].sum(dtype=np.int64)) for key in ("length", "bytes"))
    return {"documents": len(documents), "tokens": tokens, "bytes": size}


@dataclass(frozen=True)
class ShardTask:
    """The task of writing a shard into `folder` from `parts`."""

    shard: PlannedShard
    parts: Parts
    selection: Selection
    folder: Path
    dtype: np.dtype
    vocab_size: int
    key: str


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: the key of its plan, its manifest entry, and the count of each token."""

    key: str
    shard: ShardInfo
    counts: list[int]


def _record_path(work: Path, name: str) -> Path:
    return work / f"shard-{name}.json"


def finished_shard(
    work: Path, folder: Path, name: str, key: str, dtype: np.dtype
) -> ShardRecord | None:
    """Return the record of a finished shard; None if it is missing, cut, or of another plan."""
    record = load_record(_record_path(work, name), ShardRecord)
    if record is None or record.key != key:
        return None
    sizes = {
        folder / f"{name}.bin": record.shard.tokens * dtype.itemsize,
        folder / f"{name}.idx": index_bytes(record.shard.documents),
    }
    whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    return record if whole else None


def write_shard(task: ShardTask, report: Callable[[int], object]) -> str:
    """Write and verify a shard, then its record; `report` is called with bytes written."""
    shard, work = task.shard, task.parts.work
    counts = np.zeros(task.vocab_size, dtype=np.int64)
    with disk_errors(task.folder), ShardWriter(task.folder, shard.name, task.dtype) as writer:
        for tokens, documents in _read_blocks(task):
            writer.write(tokens, documents["length"], documents["bytes"])
            counts += np.bincount(tokens, minlength=task.vocab_size)
            report(tokens.nbytes)
    info = writer.info
    found = (info.documents, info.tokens, info.bytes)
    if found != (shard.documents, shard.tokens, shard.bytes):
        raise RuntimeError(f"{shard.name}: {found} documents, tokens, bytes; planned was {shard}")
    # The writer has read it back and compared its checksum.
    note_files(task.folder, shard_digests(info.to_json()))
    with disk_errors(work):
        write_record(_record_path(work, shard.name), ShardRecord(task.key, info, counts.tolist()))
    return shard.name


def _read_blocks(task: ShardTask) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # Yield a few million tokens at a time, and their documents.
    parts = task.parts
    for number, unit, first, count in task.shard.pieces:
        documents, split = parts.read(unit), parts.unit_splits[unit]
        stops = np.cumsum(documents["length"], dtype=np.int64)
        chosen = task.selection.select_indices(documents, unit, split, task.shard.split, number)
        chosen = chosen[first : first + count]
        path, size = part_path(parts.work, unit, "bin"), (parts.tokens[unit],)
        tokens = np.memmap(path, task.dtype, mode="r", shape=size)
        blocks = np.cumsum(documents["length"][chosen], dtype=np.int64) // BLOCK_TOKENS
        for some in np.split(chosen, np.flatnonzero(np.diff(blocks)) + 1):
            starts = stops[some] - documents["length"][some]
            yield _concatenate_ranges(tokens, starts, stops[some]), documents[some]


def _concatenate_ranges(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the ranges of tokens, concatenated; adjacent ranges are copied together."""
    firsts = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))
    lasts = np.append(firsts[1:], len(starts)) - 1
    runs = zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)
    return np.concatenate([tokens[start:stop] for start, stop in runs])


@dataclass
class Assembly:
    """The plan of the assembly, which is kept in a file and not recomputed after a restart."""

    selection: Selection
    shards: list[PlannedShard]
    counts: dict[str, dict[str, dict]]
    seen: dict[str, dict[str, dict]]
    empty: int
    malformed: int

    @cached_property
    def key(self) -> str:
        """Return a hash of everything that determines the shards."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
