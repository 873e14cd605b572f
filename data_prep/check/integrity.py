"""Comparison of prepared data with their manifest: shards are read whole, in parallel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import check_fingerprint, splits_of
from cat_lm.data.shards import Shard
from cat_lm.data.verified import check_tokenizer
from data_prep.common.progress import TextProgress
from data_prep.common.workers import run_tasks

BLOCK_TOKENS = 1 << 22
SMALL_BYTES = 1 << 26  # read before other processes have started


def manifest_problems(folder: Path, manifest: dict) -> Iterator[str]:
    """Yield the contradictions in the manifest and of the tokenizer; reads no shard."""
    for check in (
        lambda: check_tokenizer(folder, manifest),
        lambda: check_fingerprint(manifest, str(folder)),
    ):
        try:
            check()
        except UserError as error:
            yield str(error)
    for split in splits_of(manifest):
        counts = manifest["splits"][split]
        for key in ("documents", "tokens", "bytes"):
            if sum(shard[key] for shard in counts["shards"]) != counts[key]:
                yield f"{folder}: the shards of {split} do not add up to its number of {key}"


@dataclass(frozen=True)
class ShardCheck:
    """A worker's task: check the files of a shard against what they must hold."""

    path: Path  # without suffix
    bin_sha256: str
    idx_sha256: str
    eod_id: int
    vocab_size: int

    def __call__(self) -> list[str]:
        """Everything that is wrong with the shard."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        try:
            shard = Shard(self.path)
        except UserError as error:
            yield str(error)
            return
        again = "its SHA-256 is not the manifest's; prepare the data again"
        whole = sha256(shard.idx_path) == self.idx_sha256
        if not whole:
            yield f"{shard.idx_path}: {again}"
        digest, eods, outside = self._read(shard)
        if digest != self.bin_sha256:
            yield f"{shard.bin_path}: {again}"
        elif outside:
            yield f"{shard.bin_path}: ids outside the vocabulary of {self.vocab_size}"
        elif eods != shard.num_documents:
            yield f"{shard.bin_path}: {eods} EOD tokens for {shard.num_documents} documents"
        elif whole and not self._ends_at_eods(shard):
            yield f"{shard.idx_path}: the documents' lengths do not end at EOD tokens"

    def _read(self, shard: Shard) -> tuple[str, int, bool]:
        """SHA-256 of the tokens, how many are EOD, and whether any is no id; in one pass."""
        digest, eods, outside = hashlib.sha256(), 0, False
        for start in range(0, shard.num_tokens, BLOCK_TOKENS):
            tokens = shard.read(start, min(start + BLOCK_TOKENS, shard.num_tokens))
            digest.update(tokens)
            eods += int(np.count_nonzero(tokens == self.eod_id))
            outside |= int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0
        return digest.hexdigest(), eods, outside

    def _ends_at_eods(self, shard: Shard) -> bool:
        ends = document_ends(shard)
        if len(ends) == 0:
            return shard.num_tokens == 0
        return ends[-1] == shard.num_tokens and bool((shard.tokens[ends - 1] == self.eod_id).all())


def document_ends(shard: Shard) -> np.ndarray:
    """Return the end of each document in a shard's tokens, int64; it begins at the end before.

    Raises `UserError` for an index that cannot be: its documents or sequences lie elsewhere.
    """
    ends = np.cumsum(shard.lengths, dtype=np.int64)
    marks = np.asarray(shard.document_marks)
    if len(marks) < 2:
        return ends[:0]
    inside = marks[0] >= 0 and marks[-1] <= len(ends) and (np.diff(marks) > 0).all()
    if not inside or (shard.lengths < 0).any() or ends[-1] > shard.num_tokens:
        raise UserError(
            f"{shard.idx_path}: its documents do not lie one behind the other in "
            f"{shard.bin_path.name}; the index is damaged"
        )
    # A document of several sequences (other tools' data) ends with its last one.
    return ends[marks[1:] - 1]


def shard_problems(corpora: dict[str, TokenCorpus], workers: int) -> list[str]:
    """Everything that is wrong with the shards, in their order; `workers` processes read them."""
    checks, sizes = [], []
    for corpus in corpora.values():
        listing = corpus.manifest["splits"][corpus.split]["shards"]
        for shard, entry in zip(corpus.shards, listing, strict=True):
            checks.append(
                ShardCheck(
                    shard.bin_path.with_suffix(""),
                    entry["bin_sha256"],
                    entry["idx_sha256"],
                    corpus.eod_id,
                    corpus.vocab_size,
                )
            )
            sizes.append(shard.num_tokens * shard.dtype.itemsize)
    found: list[str] = []
    with TextProgress("checking", sum(sizes), "of shards") as progress:
        for size, problems in zip(sizes, in_processes(checks, sizes, workers), strict=True):
            found += problems
            progress.update(size)
    return found


def in_processes(
    tasks: Sequence[Callable[[], Any]], sizes: Sequence[int], workers: int
) -> Iterator[Any]:
    """Call the tasks, which must pickle, in worker processes; yield the results in their order.

    Args:
        sizes: the bytes that each reads: so few are read in this process.
    """
    if min(workers, len(tasks)) <= 1 or sum(sizes) < SMALL_BYTES:
        yield from (task() for task in tasks)
        return
    done: dict[int, Any] = {}
    following = 0
    numbered = enumerate(tasks)
    for number, result in run_tasks(_call, numbered, min(workers, len(tasks)), lambda _: None):
        done[number] = result
        while following in done:
            yield done.pop(following)
            following += 1


def _call(
    numbered: tuple[int, Callable[[], Any]], report: Callable[[int], None]
) -> tuple[int, Any]:
    number, task = numbered
    return number, task()
