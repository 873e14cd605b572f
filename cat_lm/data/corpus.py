"""A prepared folder as one stream of tokens per split, and mixtures of several folders.

Weights of a mixture count windows (sequences), not documents. Largest-remainder rounding turns them
into whole numbers of windows per block of `BLOCK`. The proportions therefore hold exactly in every
block of the run, and differ from the weights by less than 1 / BLOCK.
"""

from __future__ import annotations

import bisect
import hashlib
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import MANIFEST, splits_of
from cat_lm.data.shards import Shard

OPENING_THREADS = 16
# Open files that a process needs besides the shards: libraries, sockets, logs.
OTHER_FILES = 256
BLOCK = 10_000


class ListedShard:
    """A `Shard` of a manifest, which is opened when it is first read.

    If the ranks of many nodes opened thousands of files at once, they would overload a file system.
    """

    def __init__(
        self, folder: Path, entry: dict, dtype: str, bring: Callable[[list[dict]], object]
    ) -> None:
        self._entry, self._bring = entry, bring
        self.name: str = entry["name"]
        self.num_tokens: int = entry["tokens"]
        self.num_documents: int = entry["documents"]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.bin_path = folder / f"{self.name}.bin"

    @cached_property
    def opened(self) -> Shard:
        """Return the opened shard. Raises UserError if it differs from its manifest entry."""
        self._bring([self._entry])
        shard = Shard(self.bin_path.with_name(self.name))
        found = (shard.num_documents, shard.num_tokens, shard.dtype.name)
        expected = (self.num_documents, self.num_tokens, self.dtype.name)
        if found != expected:
            raise UserError(
                f"{shard.bin_path}: documents, tokens, dtype are {found}, "
                f"the manifest says {expected}; prepare the data again"
            )
        return shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)


class TokenCorpus:
    """One split of a prepared folder, memory-mapped: shards in order, as one stream of tokens.

    Attributes: `name` (the folder or address as the user gave it), `folder` (the local folder with
    the tokenizer and the shards), `split`, `manifest` (dict), `shards`, `entries` (the shards'
    entries in the manifest), `num_tokens` (EOD tokens included), `num_documents`, `num_bytes`
    (UTF-8 bytes of the text), `fingerprint`, `vocab_size`, `eod_id`.

    `bring` is called with a list of entries before their shards are opened, and makes the files
    available.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        manifest: dict,
        name: str | None = None,
        bring: Callable[[list[dict]], object] = lambda entries: None,
    ) -> None:
        self.name = name or str(folder)
        self.folder = folder
        self.split = split
        self.manifest = manifest
        if split not in (known := splits_of(manifest)):
            raise UserError(f"{self.name}: no split {split!r}; there are: {', '.join(known)}")
        counts = manifest["splits"][split]
        self.num_tokens: int = counts["tokens"]
        self.num_documents: int = counts["documents"]
        self.num_bytes: int = counts["bytes"]
        self.fingerprint: str = manifest["fingerprint"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eod_id: int = manifest["tokenizer"]["eod_id"]
        dtype = manifest["dtype"]
        self.entries: list[dict] = counts["shards"]
        allow_open_files(len(self.entries))
        self.shards = [ListedShard(folder, entry, dtype, bring) for entry in self.entries]
        self._token_ends = list(accumulate(shard.num_tokens for shard in self.shards))
        self._document_ends = list(accumulate(shard.num_documents for shard in self.shards))
        for key, ends in (("tokens", self._token_ends), ("documents", self._document_ends)):
            if (found := ends[-1] if ends else 0) != counts[key]:
                raise UserError(
                    f"{self.name}/{MANIFEST}: splits.{split}.{key} is {counts[key]}, its shards "
                    f"have {found}"
                )

    @property
    def parts(self) -> list[TokenCorpus]:
        """Return a list of the corpus itself, as if it were a mixture with one part."""
        return [self]

    def look(self) -> None:
        """Read the header of every shard. Raises UserError for one that differs from the manifest.

        Several are read in parallel, because a network file system answers slowly.
        """
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            list(pool.map(lambda shard: shard.opened, self.shards))

    def fetch(self, progress: Callable[[str], object] = lambda what: None) -> None:
        """Copy shards that are not on this machine; `progress` is called with what is done."""

    def gather(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens [start, stop) of the stream for each pair, in the dtype on disk.

        Ranges within one shard are views of its memory map. All reads are requested before any is
        awaited, so that a batch takes about as long as a single window. Raises `UserError`, with
        file and position, for ids outside of the vocabulary.
        """
        requests = list(self._requests(starts, stops))
        read = [shard.read(first, end) for _, shard, first, end in requests]
        pieces: list[list[np.ndarray]] = [[] for _ in starts]
        for (owner, shard, first, _), piece in zip(requests, read, strict=True):
            self._check_ids(piece, shard, first)
            pieces[owner].append(piece)
        return [p[0] if len(p) == 1 else np.concatenate([_NOTHING, *p]) for p in pieces]

    def _requests(
        self, starts: Sequence[int], stops: Sequence[int]
    ) -> Iterator[tuple[int, ListedShard, int, int]]:
        """Yield (index of the range, shard, first token, end) for each shard of each range."""
        starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        wrong = (starts < 0) | (starts > stops) | (stops > self.num_tokens)
        if wrong.any():
            start, stop = starts[wrong][0], stops[wrong][0]
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.num_tokens}")
        first = np.searchsorted(self._token_ends, starts, side="right")
        places = zip(first.tolist(), starts.tolist(), stops.tolist(), strict=True)
        for owner, (index, start, stop) in enumerate(places):
            while start < stop:
                shard, end = self.shards[index], min(stop, self._token_ends[index])
                base = self._token_ends[index] - shard.num_tokens
                yield owner, shard, start - base, end - base
                start, index = end, index + 1

    def _check_ids(self, piece: np.ndarray, shard: ListedShard, first: int) -> None:
        if piece.max() < self.vocab_size and (piece.dtype.kind == "u" or piece.min() >= 0):
            return
        at = int(np.argmax((piece < 0) | (piece >= self.vocab_size)))
        raise UserError(
            f"{shard.bin_path}: token {first + at} is the id {piece[at]}, outside of the "
            f"vocabulary of {self.vocab_size}; the file is damaged or was made with another "
            "tokenizer (python -m data_prep.inspect looks at all of it)"
        )

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the stream, int64 [stop − start]; errors as `gather`."""
        return self.gather([start], [stop])[0].astype(np.int64)

    def document(self, index: int) -> tuple[int, int]:
        """Return the range of document `index` in the stream: its start, and its end after EOD."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        which = bisect.bisect_right(self._document_ends, index)
        shard = self.shards[which]
        own = index - (self._document_ends[which] - shard.num_documents)
        (start,), (stop,) = shard.documents(own, own + 1)
        base = self._token_ends[which] - shard.num_tokens
        return base + int(start), base + int(stop)

    def describe(self) -> list[str]:
        return [
            f"{self.name}: {self.num_tokens:,} tokens, {self.num_documents:,} documents, "
            f"fingerprint {self.fingerprint[:12]}"
        ]


_NOTHING = np.empty(0, dtype=np.uint8)  # Concatenating it changes no other dtype.


def allow_open_files(shards: int) -> None:
    """Raise the limit of open files as far as allowed, because every mapped shard stays open.

    Raises:
        UserError: the hard limit is too low for this number of shards.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and shards + OTHER_FILES > hard:
        raise UserError(
            f"the data are in {shards:,} shards, but only {hard:,} files may be open; raise the "
            "hard limit (ulimit -Hn), or prepare larger shards (--shard-tokens)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Mixture:
    """One split of several corpora, with the attributes of a `TokenCorpus`; counts are summed.

    Attributes: `parts` and `counts` are the corpora and their windows per block, sorted by
    fingerprint, so that the order in the configuration does not matter. `folder` is the first
    part's (all have the same tokenizer), and `fingerprint` identifies the parts and counts.
    `manifest["unigram_loss"]` is the mean of the parts' losses, weighted by their validation tokens
    as the validation loss is: the mixture's weights apply to training only.
    Raises `UserError` for incompatible parts, and for weights below one window per block.
    """

    def __init__(self, corpora: Sequence[TokenCorpus], weights: Sequence[float]) -> None:
        _check_parts(corpora)
        self.name = " + ".join(corpus.name for corpus in corpora)
        pairs = zip(corpora, weights, strict=True)
        corpora, weights = zip(*sorted(pairs, key=lambda pair: pair[0].fingerprint), strict=True)
        self.parts = list(corpora)
        self.counts = block_counts([corpus.name for corpus in corpora], weights)
        first = self.parts[0]
        self.folder, self.split = first.folder, first.split
        self.vocab_size, self.eod_id = first.vocab_size, first.eod_id
        self.num_tokens = sum(part.num_tokens for part in self.parts)
        self.num_documents = sum(part.num_documents for part in self.parts)
        self.num_bytes = sum(part.num_bytes for part in self.parts)
        self.shards = [shard for part in self.parts for shard in part.shards]
        fingerprints = [part.fingerprint for part in self.parts]
        self.fingerprint = joint_fingerprint(fingerprints, self.counts)
        self.manifest = {"unigram_loss": _unigram_loss(self.parts)}

    def describe(self) -> list[str]:
        return [line for part in self.parts for line in part.describe()]

    def describe_draws(self, sizes: Sequence[int], planned: Sequence[int]) -> list[str]:
        """Return the proportions as lines for the log.

        Args:
            sizes, planned: for each of `parts`, windows per epoch and in the whole run.
        """
        return [
            f"{part.name}: {count / BLOCK:.2%} of the windows, {drawn:,} in the run "
            f"({drawn / size:.2f} epochs)"
            for part, count, size, drawn in zip(
                self.parts, self.counts, sizes, planned, strict=True
            )
        ]


def joint_fingerprint(fingerprints: Sequence[str], counts: Sequence[int]) -> str:
    """Return the fingerprint of a mixture from its parts', which are sorted, and block counts."""
    pairs = zip(fingerprints, counts, strict=True)
    identity = "".join(f"{fingerprint} {count}\n" for fingerprint, count in pairs)
    return hashlib.sha256(f"mixture of {BLOCK}\n{identity}".encode()).hexdigest()


def block_counts(names: Sequence[str], weights: Sequence[float]) -> list[int]:
    """Return the windows of each corpus per block, by largest remainder; ties go to earlier ones.

    Raises `UserError` for a weight of less than one window.
    """
    # With floats, rounding errors would break ties.
    total = sum(map(Fraction, weights))
    exact = [BLOCK * Fraction(weight) / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    for name, weight, count in zip(names, weights, counts, strict=True):
        if count == 0:
            raise UserError(
                f"data.mixture: the weight {weight:g} of {name} is {float(weight / total):.2g} of "
                f"all, less than one window in {BLOCK:,}; give it more, or leave it out"
            )
    return counts


def _check_parts(corpora: Sequence[TokenCorpus]) -> None:
    """Raise UserError if parts have different tokenizers, or two of them the same data."""
    first, names = corpora[0], {}
    for other in corpora:
        ours, theirs = first.manifest["tokenizer"], other.manifest["tokenizer"]
        if any(ours[key] != theirs[key] for key in ("sha256", "eod_id", "vocab_size")):
            raise UserError(
                f"data.mixture: {first.name} and {other.name} were prepared with different "
                f"tokenizers, {ours['spec']} ({ours['sha256'][:12]}) and {theirs['spec']} "
                f"({theirs['sha256'][:12]}); prepare them with the same one"
            )
        if other.fingerprint in names:
            raise UserError(
                f"data.mixture: {names[other.fingerprint]} and {other.name} hold the same data; "
                "name them once, with the sum of their weights"
            )
        names[other.fingerprint] = other.name


def _unigram_loss(parts: Sequence[TokenCorpus]) -> float:
    tokens = [part.manifest["splits"]["validation"]["tokens"] for part in parts]
    losses = [part.manifest["unigram_loss"] for part in parts]
    if not sum(tokens):
        return sum(losses) / len(losses)
    return sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
