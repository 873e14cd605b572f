"""Prepared folders made by hand: documents of chosen tokens, without any tokenizer's work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cat_lm.data.manifest import fingerprint
from cat_lm.data.shards import ShardWriter
from cat_lm.data.verified import NOTE

EOD = 0


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of all files that are the same wherever they are made; notes hold inodes and times"""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NOTE
    }


def write_shards(
    folder: Path,
    split: str,
    documents: Sequence[Sequence[int]],
    dtype: str = "uint16",
    shard_tokens: int = 10**9,
) -> list[dict]:
    """Write documents into shards of at most `shard_tokens`; return their manifest entries."""
    groups: list[list[Sequence[int]]] = []
    for document in documents:
        if not groups or sum(map(len, groups[-1])) + len(document) > shard_tokens:
            groups.append([])
        groups[-1].append(document)
    entries = []
    for number, group in enumerate(groups):
        lengths = np.array([len(document) for document in group])
        with ShardWriter(folder, f"{split}-{number:05d}", np.dtype(dtype)) as writer:
            writer.write(np.concatenate(group), lengths, lengths - 1)
        entries.append(writer.info.to_json())
    return entries


def write_prepared(
    folder: Path,
    train: Sequence[Sequence[int]],
    validation: Sequence[Sequence[int]] = ((1, 2, EOD),),
    dtype: str = "uint16",
    shard_tokens: int = 10**9,
    tokenizer: str = "t",
    unigram_loss: float = 1.0,
    vocab_size: int = 60_000,
) -> Path:
    """A folder as `data_prep.prepare` leaves it; documents are token lists that end with EOD."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, documents in (("train", train), ("validation", validation)):
        listed = write_shards(folder, split, documents, dtype, shard_tokens)
        keys = ("documents", "tokens", "bytes")
        splits[split] = {key: sum(s[key] for s in listed) for key in keys} | {"shards": listed}
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer/tokenizer.json").write_text(tokenizer)
    sha256 = hashlib.sha256(tokenizer.encode()).hexdigest()
    shards = [shard for counts in splits.values() for shard in counts["shards"]]
    info = {"spec": tokenizer, "sha256": sha256, "vocab_size": vocab_size, "eod_id": EOD}
    manifest = {
        "format_version": 1,
        "dtype": dtype,
        "fingerprint": fingerprint(shards, sha256),
        "source": {},
        "sources": {
            "Web": {"train": _counts(3), "validation": _counts(1)},
            "Books": {"train": _counts(1)},
        },
        "unigram_loss": unigram_loss,
        "tokenizer": info,
        "splits": splits,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def bare_manifest(shards: list[dict], vocab_size: int, dtype: str = "uint16") -> dict:
    """A manifest of training shards whose checksums nobody has computed, and no held-out text."""
    listed = [{"bin_sha256": "0" * 64, "idx_sha256": "0" * 64, **shard} for shard in shards]
    sums = {key: sum(shard[key] for shard in listed) for key in ("documents", "tokens", "bytes")}
    return {
        "format_version": 1,
        "dtype": dtype,
        "fingerprint": fingerprint(listed, "0" * 64),
        "source": {},
        "sources": {},
        "unigram_loss": 1.0,
        "tokenizer": {"spec": "t", "vocab_size": vocab_size, "eod_id": EOD, "sha256": "0" * 64},
        "splits": {
            "train": {**sums, "shards": listed},
            "validation": {"documents": 0, "tokens": 0, "bytes": 0, "shards": []},
        },
    }


def _counts(tokens: int) -> dict[str, int]:
    return {"documents": 1, "tokens": tokens, "bytes": tokens}


def random_documents(count: int, longest: int, seed: int = 0, shift: int = 1) -> list[list[int]]:
    """Documents of 1 … `longest` tokens, many short ones; each token value stands once."""
    lengths = np.random.default_rng(seed).geometric(4 / longest, count).clip(1, longest)
    documents, token = [], shift
    for length in lengths.tolist():
        documents.append([*range(token, token + length - 1), EOD])
        token += length - 1
    return documents
