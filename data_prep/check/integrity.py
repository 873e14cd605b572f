"""Compare prepared data with their manifest, and find exact duplicates, by reading all shards."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import SPLITS, check_fingerprint, splits_of
from cat_lm.data.shards import Shard
from cat_lm.data.verified import check_tokenizer, shard_digests
from data_prep.common.progress import progress_bar
from data_prep.common.workers import run_tasks

BLOCK_TOKENS = 1 << 22
PART_DOCUMENTS = 1 << 22  # approximate number of documents that are sorted and compared at a time
SMALL_BYTES = 1 << 26  # Less is read before worker processes would have started.
EXAMPLES = 5  # number of duplicates of each type that are shown


def manifest_problems(folder: Path, manifest: dict) -> Iterator[str]:
    """Yield the problems of the manifest and the tokenizer, without reading shards."""
    for check, given in (
        (check_tokenizer, (folder, manifest)),
        (check_fingerprint, (manifest, str(folder))),
    ):
        try:
            check(*given)
        except UserError as error:
            yield str(error)
    for split in splits_of(manifest):
        counts = manifest["splits"][split]
        for key in ("documents", "tokens", "bytes"):
            if sum(shard[key] for shard in counts["shards"]) != counts[key]:
                yield f"{folder}: the shards of {split} do not add up to its number of {key}"


def document_ends(shard: Shard) -> np.ndarray:
    """Return the end of each document in a shard's tokens, int64; documents are contiguous.

    Raises:
        UserError: the index is damaged, as its documents or sequences are not contiguous.
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


@dataclass(frozen=True)
class ShardCheck:
    """A worker's task that returns the problems of a shard's files."""

    path: Path  # the shard without suffix
    digests: dict[str, str]
    eod_id: int
    vocab_size: int

    def __call__(self) -> list[str]:
        try:
            return list(self._problems(Shard(self.path)))
        except UserError as error:
            return [str(error)]

    def _problems(self, shard: Shard) -> Iterator[str]:
        again = "its SHA-256 is not the manifest's; prepare the data again"
        whole = sha256(shard.idx_path) == self.digests[shard.idx_path.name]
        if not whole:
            yield f"{shard.idx_path}: {again}"
        digest, eods, outside = hashlib.sha256(), 0, False
        for start in range(0, shard.num_tokens, BLOCK_TOKENS):
            tokens = shard.read(start, min(start + BLOCK_TOKENS, shard.num_tokens))
            digest.update(tokens)
            eods += int(np.count_nonzero(tokens == self.eod_id))
            outside |= int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0
        if digest.hexdigest() != self.digests[shard.bin_path.name]:
            yield f"{shard.bin_path}: {again}"
        elif outside:
            yield f"{shard.bin_path}: ids outside the vocabulary of {self.vocab_size}"
        elif eods != shard.num_documents:
            yield f"{shard.bin_path}: {eods} EOD tokens for {shard.num_documents} documents"
        elif whole:
            ends = np.append(0, document_ends(shard))
            at_eods = (shard.tokens[ends[1:] - 1] == self.eod_id).all()
            if ends[-1] != shard.num_tokens or not at_eods:
                yield f"{shard.idx_path}: the documents' lengths do not end at EOD tokens"


def shard_problems(corpora: dict[str, TokenCorpus], workers: int) -> list[str]:
    """Return the problems of all shards, in their order."""
    checks, shards = [], []
    for corpus in corpora.values():
        shards += corpus.shards
        for entry in corpus.entries:
            ids, path = (corpus.eod_id, corpus.vocab_size), corpus.folder / entry["name"]
            checks.append(ShardCheck(path, shard_digests(entry), *ids))
    found = _run_on_shards(checks, shards, "checking shards", workers)
    return [problem for problems in found for problem in problems]


def _run_on_shards(
    tasks: Sequence[Callable[[], Any]], shards: Sequence[Any], label: str, workers: int
) -> list[Any]:
    sizes = [shard.num_tokens * shard.dtype.itemsize for shard in shards]
    workers = min(workers, len(tasks)) if sum(sizes) >= SMALL_BYTES else 1
    found = {}
    with progress_bar(label, sum(sizes)) as bar:
        for number, result in run_tasks(
            _run_numbered, enumerate(tasks), max(1, workers), bar.update
        ):
            found[number] = result
            bar.update(sizes[number])
    return [found[number] for number in range(len(tasks))]


def _run_numbered(numbered: tuple[int, Callable[[], Any]], report: Callable[[int], object]) -> Any:
    number, task = numbered
    return number, task()


@dataclass(frozen=True)
class HashShard:
    """A worker's task that writes a 64-bit hash of each document of a shard to a file."""

    path: Path  # the shard without suffix
    out: Path

    def __call__(self) -> None:
        shard = Shard(self.path)
        edges = np.append(0, document_ends(shard)).tolist()
        with open(self.out, "wb") as stream:
            for start, end in itertools.pairwise(edges):
                stream.write(hashlib.blake2b(shard.read(start, end), digest_size=8).digest())


def find_duplicates(
    corpora: dict[str, TokenCorpus], workers: int, scratch: Path | None
) -> Iterator[pd.DataFrame]:
    """Yield tables of documents that are exact copies of an earlier one of their split or of train.

    Documents with equal 64-bit hashes (8 bytes per document in `scratch`) are read again and
    compared by SHA-256. Memory is bounded, because each table covers about `PART_DOCUMENTS` hashes.

    Yields:
        Tables with the columns kind (train or validation: a copy within the split; across: a
        validation document that is in train), document and same_as (indices in their splits), and
        tokens (EOD included).
    """
    shards = [shard for split in SPLITS for shard in corpora[split].shards]
    with tempfile.TemporaryDirectory(prefix="cat-lm-inspect-", dir=scratch) as folder:
        files = [Path(folder) / f"{number}" for number in range(len(shards))]
        paths = [shard.bin_path.with_suffix("") for shard in shards]
        tasks = [HashShard(path, file) for path, file in zip(paths, files, strict=True)]
        _run_on_shards(tasks, shards, "hashing documents", workers)
        parts = -(-sum(shard.num_documents for shard in shards) // PART_DOCUMENTS)
        for part in range(parts):
            yield _compare_documents(corpora, _find_repeated_hashes(files, part, parts))


def _find_repeated_hashes(files: Sequence[Path], part: int, parts: int) -> np.ndarray:
    """Return the documents with repeated hashes h, among those with h mod `parts` = `part`."""
    numbers, values, base = [], [], 0
    for file in files:
        hashes = np.fromfile(file, np.uint64)
        own = np.flatnonzero(hashes % parts == part)
        numbers.append(own + base)
        values.append(hashes[own])
        base += len(hashes)
    found = np.concatenate(values)
    ordered = np.sort(found)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return np.concatenate(numbers)[np.isin(found, several)]


def _compare_documents(corpora: dict[str, TokenCorpus], numbers: np.ndarray) -> pd.DataFrame:
    train = corpora["train"].num_documents
    rows = []
    for number in numbers.tolist():
        split, document = ("train", number) if number < train else ("validation", number - train)
        tokens = corpora[split].tokens(*corpora[split].document(document))
        digest = hashlib.sha256(tokens.tobytes()).digest()
        rows.append((split, document, len(tokens), digest))
    found = pd.DataFrame(rows, columns=["split", "document", "tokens", "digest"])
    within = found.assign(same_as=found.groupby(["split", "digest"])["document"].transform("first"))
    within = within[within["document"] != within["same_as"]].rename(columns={"split": "kind"})
    originals = found[found["split"] == "train"].drop_duplicates("digest")
    originals = originals.set_index("digest")["document"]
    across = found[found["split"] == "validation"].assign(kind="across")
    across = across.assign(same_as=across["digest"].map(originals)).dropna(subset="same_as")
    return pd.concat([within, across])[["kind", "document", "same_as", "tokens"]].astype(
        {"document": int, "same_as": int, "tokens": int}
    )
