"""A prepared folder as one stream of tokens per split."""

from __future__ import annotations

import bisect
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import MANIFEST, splits_of
from cat_lm.data.shards import Shard

OPENING_THREADS = 16


class ListedShard:
    """A shard that a manifest lists; its files are looked at where they are first read.

    Ranks of many nodes that each look at thousands of files keep a file system's servers busy.
    All that a `Shard` has is here too.
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
        """The shard itself. Raises UserError where it is not what the manifest says."""
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

    Attributes: `name` (what a person calls it: the folder as given, or its address), `folder`
    (where the tokenizer and the shards are on this machine), `split`, `manifest` (dict), `shards`
    and `entries` (what the manifest says of each),
    `num_tokens` (EOD tokens included), `num_documents`, `num_bytes` (UTF-8 bytes of the text),
    `fingerprint`, `vocab_size`, `eod_id`, `has_signed_ids` (ids on disk could be negative).
    `bring` is called with entries of the manifest before their shards are opened.
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
        self.has_signed_ids = np.dtype(dtype).kind == "i"
        self.entries: list[dict] = counts["shards"]
        _allow_open_files()
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
        """The corpus itself, as the one part of a mixture."""
        return [self]

    def look(self) -> None:
        """Look at the header of each shard. Raises UserError for what is not as the manifest says.

        On a network disk that is waiting, so several are looked at together.
        """
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            list(pool.map(lambda shard: shard.opened, self.shards))

    def fetch(self, progress: Callable[[str], object] = lambda what: None) -> None:
        """Bring all shards to this machine, where they are not; `progress` is told of it."""

    def gather(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Return tokens [start, stop) of the stream for each pair, in the dtype on disk.

        Views of the memory map where one shard holds them all. The disk is asked for everything
        before this returns, and for nothing one by one: a batch waits about as long as a window.
        """
        pieces: list[list[np.ndarray]] = [[] for _ in starts]
        for owner, shard, first, end in self._requests(starts, stops):
            pieces[owner].append(shard.read(first, end))
        return [p[0] if len(p) == 1 else np.concatenate([_NOTHING, *p]) for p in pieces]

    def _requests(
        self, starts: Sequence[int], stops: Sequence[int]
    ) -> Iterator[tuple[int, ListedShard, int, int]]:
        """Yield the tokens of shards that ranges are made of, each with its range's number."""
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

    def name_outside(self, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Find the first id in tokens [start, stop) that the vocabulary does not have.

        Raises:
            UserError: there is one; names the file, the token in it, and the id.
        """
        for _, shard, start, stop in self._requests(starts, stops):
            values = shard.read(start, stop).astype(np.int64)
            wrong = (values < 0) | (values >= self.vocab_size)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise UserError(
                    f"{shard.bin_path}: token {start + at} is the id {values[at]}, outside of the "
                    f"vocabulary of {self.vocab_size}; the file is damaged or was made with "
                    "another tokenizer (python -m data_prep.inspect looks at all of it)"
                )

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the stream, int64 [stop − start], across shard boundaries.

        Raises `UserError` for ids that the vocabulary does not have.
        """
        found = self.gather([start], [stop])[0]
        if has_outside(found, self.vocab_size):
            self.name_outside([start], [stop])
        return found.astype(np.int64)

    def document(self, index: int) -> tuple[int, int]:
        """Return the first token of document `index` in the stream, and its end (past its EOD)."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        which = bisect.bisect_right(self._document_ends, index)
        shard = self.shards[which]
        own = index - (self._document_ends[which] - shard.num_documents)
        (start,), (stop,) = shard.documents(own, own + 1)
        base = self._token_ends[which] - shard.num_tokens
        return base + int(start), base + int(stop)

    def describe(self) -> list[str]:
        """Describe the data for the log: their size, and the share of each source."""
        lines = [
            f"{self.name}: {self.num_tokens:,} tokens, {self.num_documents:,} documents, "
            f"fingerprint {self.fingerprint[:12]}"
        ]
        by_source = {
            source: splits[self.split]["tokens"]
            for source, splits in self.manifest["sources"].items()
            if self.split in splits
        }
        if len(by_source) > 1 and (total := sum(by_source.values())):
            largest_first = sorted(by_source.items(), key=lambda item: -item[1])
            shares = ", ".join(f"{name} {tokens / total:.2%}" for name, tokens in largest_first)
            lines.append(f"{self.name}: {shares}")
        return lines


_NOTHING = np.empty(0, dtype=np.uint8)  # any other dtype wins over it


def has_outside(ids: np.ndarray, vocab_size: int) -> bool:
    """Return True if any of these is no id of the vocabulary."""
    if not ids.size:
        return False
    return int(ids.max()) >= vocab_size or (ids.dtype.kind == "i" and int(ids.min()) < 0)


def _allow_open_files() -> None:
    """Raise this process's soft limit of open files: a memory map keeps its file open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
