"""A prepared folder as one stream of tokens per split."""

from __future__ import annotations

import bisect
import hashlib
import json
import re
import resource
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cat_lm.data.shards import Shard
from cat_lm.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
PACKING = "packing"  # folder of what `cat_lm.data.packing` keeps beside the shards
DEFAULT_CACHE = "~/.cache/cat_lm/data"
# Opening a shard on a network disk is waiting; so many are opened at once.
OPENING_THREADS = 16
# Files that a process needs besides the shards: libraries, sockets, logs.
OTHER_FILES = 256
REQUIRED = {
    "dtype": str,
    "fingerprint": str,
    "source": dict,
    "sources": dict,
    "splits": dict,
    "tokenizer": dict,
    "unigram_loss": (int, float),
}
REQUIRED_OF_SPLIT = {"documents": int, "tokens": int, "bytes": int, "shards": list}


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a prepared folder.

    Raises `UserError` where there is none (the folder is absent or its preparation did not finish),
    where it is not readable, or where it is of another format version.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        what = "holds no finished data" if Path(folder).is_dir() else "no such folder"
        raise UserError(f"{folder}: {what} (no {MANIFEST}); run python -m data_prep.prepare")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(text: bytes, name: str) -> dict:
    """A manifest from its text; `name` is what errors call it. Raises `UserError` as above."""
    try:
        manifest = json.loads(text.decode("utf-8"))
        version = manifest["format_version"]
        missing = [key for key in REQUIRED if key not in manifest]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{name}: not a manifest of prepared data ({reason})") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{name}: format_version {version}, this version reads {FORMAT_VERSION}")
    if missing:
        raise UserError(f"{name}: not a manifest of prepared data (no {', '.join(missing)})")
    if wrong := _wrong_types(manifest):
        raise UserError(f"{name}: damaged, {wrong} is not what it should be")
    return manifest


def _wrong_types(manifest: dict) -> str | None:
    """The first entry that is not of its type."""
    places = [("", manifest, REQUIRED)]
    if isinstance(manifest["splits"], dict):
        splits = manifest["splits"].items()
        places += [(f"splits.{split}.", counts, REQUIRED_OF_SPLIT) for split, counts in splits]
    for where, found, required in places:
        for key, kind in required.items():
            if not isinstance(found, dict) or not isinstance(found.get(key), kind):
                return where + key
    for split, counts in manifest["splits"].items():
        if not all(isinstance(shard, dict) for shard in counts["shards"]):
            return f"splits.{split}.shards"
    return None


def is_remote(folder: Path | str) -> bool:
    """Whether it is an address, such as s3://bucket/data, and no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(folder)) is not None


def fingerprint(shards: Iterable[dict], tokenizer_sha256: str) -> str:
    """SHA-256 over the shards' checksums, in order, and the tokenizer's: the data's identity."""
    digest = hashlib.sha256(tokenizer_sha256.encode())
    for shard in shards:
        digest.update(f"{shard['name']} {shard['bin_sha256']} {shard['idx_sha256']}\n".encode())
    return digest.hexdigest()


def cache_folder(cache_dir: Path | str | None) -> Path:
    """Where copies and plans go that cannot be beside the data (`data.cache_dir`)."""
    return Path(cache_dir or DEFAULT_CACHE).expanduser()


class TokenCorpus:
    """One split of a prepared folder, memory-mapped: shards in order, as one stream of tokens.

    Attributes: `name` (what a person calls it: the folder as given, or its address), `folder`
    (where the tokenizer and the shards are on this machine), `split`, `manifest` (dict),
    `num_tokens` (EOD tokens included), `num_documents`, `num_bytes` (UTF-8 bytes of the text),
    `fingerprint`, `vocab_size`, `eod_id`.
    """

    def __init__(self, folder: Path, split: str, manifest: dict, name: str | None = None) -> None:
        self.name = name or str(folder)
        self.folder = folder
        self.split = split
        self.manifest = manifest
        if split not in manifest["splits"]:
            known = ", ".join(manifest["splits"])
            raise UserError(f"{self.name}: no split {split!r}; there are: {known}")
        counts = manifest["splits"][split]
        self.num_tokens: int = counts["tokens"]
        self.num_documents: int = counts["documents"]
        self.num_bytes: int = counts["bytes"]
        self.fingerprint: str = manifest["fingerprint"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eod_id: int = manifest["tokenizer"]["eod_id"]
        self.shards = self._open_shards(counts["shards"])
        self._token_ends = _running_sum(shard.num_tokens for shard in self.shards)
        self._document_ends = _running_sum(shard.num_documents for shard in self.shards)

    @classmethod
    def open(
        cls, folder: Path | str, split: str, cache_dir: Path | str | None = None
    ) -> TokenCorpus:
        """Opens `split` of `folder`; reads the manifest and a header per shard, no tokens.

        `folder` may be an address (s3://bucket/data): see `cat_lm.data.remote`, which keeps local
        copies in `cache_dir`. Raises `UserError` for an unfinished folder, an unknown split, or
        shards whose sizes disagree with the manifest.
        """
        if is_remote(folder):
            from cat_lm.data.remote import open_remote

            return open_remote(str(folder), split, cache_dir)
        return cls(Path(folder), split, read_manifest(folder))

    def _open_shards(self, listed: list[dict]) -> list[Shard]:
        allow_open_files(len(listed))

        def opened(entry: dict) -> Shard:
            return open_shard(self.folder, entry, self.manifest["dtype"])

        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            return list(pool.map(opened, listed))

    def gather(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Tokens [start, stop) of the stream for each pair, in the dtype on disk.

        Views of the memory map where one shard holds them all. The disk is asked for everything
        before this returns, and for nothing one by one: a batch waits about as long as a window.
        """
        starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        wrong = (starts < 0) | (starts > stops) | (stops > self.num_tokens)
        if wrong.any():
            start, stop = starts[wrong][0], stops[wrong][0]
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.num_tokens}")
        first = np.searchsorted(self._token_ends, starts, side="right")
        requests, owners = [], []
        places = zip(first.tolist(), starts.tolist(), stops.tolist(), strict=True)
        for owner, (index, start, stop) in enumerate(places):
            while start < stop:
                shard, end = self.shards[index], min(stop, self._token_ends[index])
                base = self._token_ends[index] - shard.num_tokens
                requests.append((shard, start - base, end - base))
                owners.append(owner)
                start, index = end, index + 1
        pieces: list[list[np.ndarray]] = [[] for _ in starts]
        for owner, piece in zip(owners, self._read(requests), strict=True):
            pieces[owner].append(piece)
        return [p[0] if len(p) == 1 else np.concatenate([_NOTHING, *p]) for p in pieces]

    def _read(self, requests: list[tuple[Shard, int, int]]) -> list[np.ndarray]:
        return [shard.read(start, stop) for shard, start, stop in requests]

    def read_ahead(self) -> None:
        """Says that all shards are about to be read, one after the other."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64 [stop − start], across shard boundaries."""
        return self.gather([start], [stop])[0].astype(np.int64)

    def document(self, index: int) -> tuple[int, int]:
        """Where document `index` lies in the stream: its first token and its end (past its EOD)."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        which = bisect.bisect_right(self._document_ends, index)
        shard = self.shards[which]
        start, stop = shard.document(index - (self._document_ends[which] - shard.num_documents))
        base = self._token_ends[which] - shard.num_tokens
        return base + start, base + stop

    def describe(self) -> list[str]:
        """What the log says of the data: their size, and the share of each source."""
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


def open_shard(folder: Path, entry: dict, dtype: str) -> Shard:
    """A shard that a manifest lists. Raises `UserError` where it is not what the list says."""
    shard = Shard(folder / entry["name"])
    found = (shard.num_documents, shard.num_tokens, shard.dtype.name)
    expected = (entry["documents"], entry["tokens"], dtype)
    if found != expected:
        raise UserError(
            f"{shard.bin_path}: documents, tokens, dtype are {found}, "
            f"the manifest says {expected}; prepare the data again"
        )
    return shard


def allow_open_files(shards: int) -> None:
    """Raises this process's soft limit of open files: a memory map keeps its file open.

    Raises `UserError` where the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return
    if shards + OTHER_FILES > hard:
        raise UserError(
            f"the data are in {shards:,} shards, but only {hard:,} files may be open; raise the "
            "hard limit (ulimit -Hn), or prepare larger shards (--shard-tokens)"
        )
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _running_sum(values: Iterable[int]) -> list[int]:
    ends, total = [], 0
    for value in values:
        total += value
        ends.append(total)
    return ends
