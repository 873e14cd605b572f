"""A prepared folder as one stream of tokens per split."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cat_lm.data.shards import Shard
from cat_lm.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
REQUIRED = ("dtype", "fingerprint", "source", "sources", "splits", "tokenizer", "unigram_loss")


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a prepared folder.

    Raises `UserError` where there is none (the folder is absent or its preparation did not finish),
    where it is not readable, or where it is of another format version.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        what = "holds no finished data" if Path(folder).is_dir() else "no such folder"
        raise UserError(f"{folder}: {what} (no {MANIFEST}); run python -m data_prep.prepare")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
        missing = [key for key in REQUIRED if key not in manifest]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: not a manifest of prepared data ({reason})") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version {version}, this version reads {FORMAT_VERSION}")
    if missing:
        raise UserError(f"{path}: not a manifest of prepared data (no {', '.join(missing)})")
    return manifest


def fingerprint(shards: Iterable[dict], tokenizer_sha256: str) -> str:
    """SHA-256 over the shards' checksums, in order, and the tokenizer's: the data's identity."""
    digest = hashlib.sha256(tokenizer_sha256.encode())
    for shard in shards:
        digest.update(f"{shard['name']} {shard['bin_sha256']} {shard['idx_sha256']}\n".encode())
    return digest.hexdigest()


class TokenCorpus:
    """One split of a prepared folder, memory-mapped: shards in order, as one stream of tokens.

    Attributes: `folder`, `split`, `manifest` (dict), `num_tokens` (EOD tokens included),
    `num_documents`, `num_bytes` (UTF-8 bytes of the text), `fingerprint`, `vocab_size`, `eod_id`.
    """

    def __init__(self, folder: Path, split: str, manifest: dict) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        counts = manifest["splits"][split]
        self.num_tokens: int = counts["tokens"]
        self.num_documents: int = counts["documents"]
        self.num_bytes: int = counts["bytes"]
        self.fingerprint: str = manifest["fingerprint"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eod_id: int = manifest["tokenizer"]["eod_id"]
        self.shards = [Shard(folder / shard["name"]) for shard in counts["shards"]]
        self._token_ends = _running_sum(shard.num_tokens for shard in self.shards)
        self._document_ends = _running_sum(shard.num_documents for shard in self.shards)

    @classmethod
    def open(cls, folder: Path | str, split: str) -> TokenCorpus:
        """Opens `split` of `folder`; reads the manifest and a header per shard, no tokens.

        Raises `UserError` for an unfinished folder, an unknown split, or shards whose sizes
        disagree with the manifest.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if split not in manifest["splits"]:
            known = ", ".join(manifest["splits"])
            raise UserError(f"{folder}: no split {split!r}; there are: {known}")
        corpus = cls(folder, split, manifest)
        for shard, listed in zip(corpus.shards, manifest["splits"][split]["shards"], strict=True):
            found = (shard.num_documents, shard.num_tokens, shard.dtype.name)
            expected = (listed["documents"], listed["tokens"], manifest["dtype"])
            if found != expected:
                raise UserError(
                    f"{shard.bin_path}: documents, tokens, dtype are {found}, "
                    f"the manifest says {expected}; prepare the data again"
                )
        return corpus

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64 [stop − start], across shard boundaries."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.num_tokens}")
        out = np.empty(stop - start, dtype=np.int64)
        index = bisect.bisect_right(self._token_ends, start)
        position = start
        while position < stop:
            end = self._token_ends[index]
            shard = self.shards[index]
            offset = position - (end - shard.num_tokens)
            count = min(stop, end) - position
            out[position - start : position - start + count] = shard.read(offset, offset + count)
            position += count
            index += 1
        return out

    def document(self, index: int) -> tuple[int, int]:
        """Where document `index` lies in the stream: its first token and its end (past its EOD)."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        which = bisect.bisect_right(self._document_ends, index)
        shard = self.shards[which]
        start, stop = shard.document(index - (self._document_ends[which] - shard.num_documents))
        base = self._token_ends[which] - shard.num_tokens
        return base + start, base + stop


def _running_sum(values: Iterable[int]) -> list[int]:
    ends, total = [], 0
    for value in values:
        total += value
        ends.append(total)
    return ends
