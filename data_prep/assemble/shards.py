"""Final shards out of parts: where each begins and ends, and the writing of one of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from cat_lm.core.files import atomic_write, sha256
from cat_lm.data.shards import ShardInfo, ShardWriter, index_bytes
from cat_lm.data.verified import note_files, shard_digests
from data_prep.assemble.selection import Selection
from data_prep.encode.parts import Parts, disk_errors, part_path, read_record, write_record

ASSEMBLY = "assembly.json"
BLOCK_TOKENS = 1 << 22
# The held-out split goes first: it is small and reads all parts, which the other one then frees.
ORDER = ("validation", "train")


@dataclass
class PlannedShard:
    """A shard to be: its name, its counts, and its pieces (pass, unit, first document, number).

    Documents are counted among those that the pass takes from the unit.
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

    def add(self, number: int, unit: int, first: int, lengths: np.ndarray, sizes: np.ndarray):
        self.pieces.append((number, unit, first, len(lengths)))
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.bytes += int(sizes.sum(dtype=np.int64))


def plan_shards(
    parts: Parts, selection: Selection, shard_tokens: int
) -> tuple[list[PlannedShard], dict[str, dict[str, Counter]]]:
    """Return all shards in the order in which they are made, and counts by set and split.

    A shard takes documents in order until the next one would make it larger than `shard_tokens`;
    a document that is larger than that has a shard of its own.
    """
    shards: list[PlannedShard] = []
    counts: dict[str, dict[str, Counter]] = {}
    for split in ORDER:
        made: list[PlannedShard] = []
        for number in range(selection.passes if split == "train" else 1):
            for unit, documents in parts.scan():
                chosen = documents[
                    selection.chosen(documents, unit, parts.unit_splits[unit], split, number)
                ]
                _cut(made, split, number, unit, chosen, shard_tokens)
                _count(counts, parts.names, split, chosen)
        shards += made
    return shards, counts


def _cut(
    shards: list[PlannedShard],
    split: str,
    number: int,
    unit: int,
    documents: np.ndarray,
    shard_tokens: int,
) -> None:
    lengths, sizes = documents["length"], documents["bytes"]
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        if not shards:
            shards.append(PlannedShard(split, 0))
        shard = shards[-1]
        before = int(ends[first - 1]) if first else 0
        room = before + shard_tokens - shard.tokens
        stop = int(np.searchsorted(ends, room, side="right"))
        if stop <= first:
            if shard.tokens:
                shards.append(PlannedShard(split, shard.number + 1))
                continue
            stop = first + 1
        shard.add(number, unit, first, lengths[first:stop], sizes[first:stop])
        first = stop


def _count(counts: dict, names: list[str], split: str, documents: np.ndarray) -> None:
    for index in np.unique(documents["set"]).tolist():
        members = documents[documents["set"] == index]
        counts.setdefault(names[index], {}).setdefault(split, Counter()).update(
            documents=len(members),
            tokens=int(members["length"].sum(dtype=np.int64)),
            bytes=int(members["bytes"].sum(dtype=np.int64)),
        )


@dataclass(frozen=True)
class ShardTask:
    """A shard to be written into `folder`, out of `parts`."""

    shard: PlannedShard
    parts: Parts
    selection: Selection
    folder: Path
    dtype: str
    vocab_size: int
    key: str


def _record_path(work: Path, name: str) -> Path:
    return work / f"shard-{name}.json"


def token_counts_path(work: Path, name: str) -> Path:
    """Return the file that counts each token of a shard, int64 [vocab_size]."""
    return work / f"shard-{name}.npy"


def finished_shard(work: Path, folder: Path, name: str, key: str, dtype: str) -> ShardInfo | None:
    """Describe a finished shard; None where it is not there, not whole, or of another plan."""
    record = read_record(_record_path(work, name), ("key", "shard", "counts_sha256"))
    if record is None or record["key"] != key:
        return None
    info = ShardInfo(**record["shard"])
    sizes = {
        folder / f"{name}.bin": info.tokens * np.dtype(dtype).itemsize,
        folder / f"{name}.idx": index_bytes(info.documents),
    }
    whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    counts = token_counts_path(work, name)
    whole = whole and counts.is_file() and sha256(counts) == record["counts_sha256"]
    return info if whole else None


def write_shard(task: ShardTask, report: Callable[[int], None]) -> str:
    """Write a shard, verified, then its record; `report` gets bytes of tokens."""
    shard, work = task.shard, task.parts.work
    dtype = np.dtype(task.dtype).newbyteorder("<")
    counts = np.zeros(task.vocab_size, dtype=np.int64)
    with (
        disk_errors(task.folder),
        ShardWriter(task.folder, shard.split, dtype, shard.tokens, first=shard.number) as writer,
    ):
        for tokens, documents in _blocks(task, dtype):
            writer.write(tokens, documents["length"], documents["bytes"])
            counts += np.bincount(tokens, minlength=task.vocab_size)
            report(tokens.nbytes)
    (info,) = writer.shards
    found = (info.documents, info.tokens, info.bytes)
    if found != (shard.documents, shard.tokens, shard.bytes):
        raise RuntimeError(f"{shard.name}: {found} documents, tokens, bytes; planned was {shard}")
    # It was read again before it got its name.
    note_files(task.folder, shard_digests(info.to_json()))
    with disk_errors(work):
        path = token_counts_path(work, shard.name)
        with atomic_write(path, "wb") as stream:
            np.save(stream, counts)
        record = {"key": task.key, "shard": info.to_json(), "counts_sha256": sha256(path)}
        write_record(_record_path(work, shard.name), record)
    return shard.name


def _blocks(task: ShardTask, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # Some million tokens at a time, and their documents.
    parts = task.parts
    for number, unit, first, count in task.shard.pieces:
        documents, split = parts.read(unit), parts.unit_splits[unit]
        stops = np.cumsum(documents["length"], dtype=np.int64)
        chosen = task.selection.chosen(documents, unit, split, task.shard.split, number)
        chosen = chosen[first : first + count]
        path, size = part_path(parts.work, unit, "bin"), (parts.records[unit]["tokens"],)
        tokens = np.memmap(path, dtype, mode="r", shape=size)
        ends = np.cumsum(documents["length"][chosen], dtype=np.int64)
        begin = 0
        while begin < len(chosen):
            before = int(ends[begin - 1]) if begin else 0
            stop = int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right"))
            some = chosen[begin : max(stop, begin + 1)]
            starts = stops[some] - documents["length"][some]
            yield _gather(tokens, starts, stops[some]), documents[some]
            begin += len(some)


def _gather(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return these ranges of tokens, one behind the other; neighbours are copied together."""
    firsts = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))
    lasts = np.append(firsts[1:], len(starts)) - 1
    runs = zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)
    return np.concatenate([tokens[start:stop] for start, stop in runs])


@dataclass
class Assembly:
    """The plan of the assembly; once written, what has been decided stays, whatever is deleted."""

    selection: Selection
    shards: list[PlannedShard]
    counts: dict[str, dict[str, dict]]
    seen: dict[str, dict[str, dict]]
    empty: int
    malformed: int

    @cached_property
    def key(self) -> str:
        """Return the identity of the shards: everything that decides them."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
