"""The manifest of prepared data, and the summary of it that is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import cat_lm
from cat_lm.data.manifest import FORMAT_VERSION, fingerprint
from cat_lm.data.shards import ShardInfo
from cat_lm.data.tokenizers import TokenizerInfo
from data_prep.assemble.shards import Assembly
from data_prep.encode.encoding import PLACES
from data_prep.sources.base import UNKNOWN_SET, LeftOut
from data_prep.sources.slimpajama import KNOWN_SETS

# Of validation tokens: below, the loss depends on the few documents that happen to be held out.
FEW_TOKENS = 10_000
COUNTS = ("documents", "tokens", "bytes")


def build_manifest(
    identity: dict,
    info: TokenizerInfo,
    dtype: str,
    assembly: Assembly,
    shards: dict[str, list[ShardInfo]],
    token_counts: dict[str, np.ndarray],
    left_out: Sequence[LeftOut],
) -> dict:
    """Return all there is to say of the data; the same for every machine, worker and kill.

    Args:
        token_counts: of each split, int64 [vocab_size].
        left_out: the source's files that are not read.
    """
    own = _manifest(identity, info, dtype, shards, token_counts)
    for split, counts in own["splits"].items():
        eods = int(token_counts[split][info.eod_id])
        if (eods, int(token_counts[split].sum())) != (counts["documents"], counts["tokens"]):
            raise RuntimeError(f"{split}: {eods} EOD tokens for {counts['documents']} documents")
    middle = {
        "empty_documents": assembly.empty,
        "malformed_documents": assembly.malformed,
        "sources": {name: dict(by_split) for name, by_split in sorted(assembly.counts.items())},
        "input": assembly.seen,
        **({"left_out": [asdict(entry) for entry in left_out]} if left_out else {}),
        "selection": _selection(assembly),
    }
    return _ordered(own, middle)


def manifest_of(
    sets: dict[str, dict[str, list[ShardInfo]]],
    token_counts: dict[str, np.ndarray],
    info: TokenizerInfo,
    dtype: np.dtype,
    arguments: dict,
) -> dict:
    """Return the manifest of data that are prepared without a choice of documents.

    Args:
        sets: the shards of each set by their split.
        token_counts: of each split, int64 [vocab_size].
        arguments: what was asked for, with a description of the `source`.
    """
    shards = {}
    for split in token_counts:
        found = [shard for by_split in sets.values() for shard in by_split.get(split, ())]
        shards[split] = sorted(found, key=lambda shard: shard.name)  # as they were given
    sources = {
        name: {split: _sums(own) for split, own in by_split.items() if own}
        for name, by_split in sorted(sets.items())
    }
    own = _manifest(arguments, info, dtype.name, shards, token_counts)
    return _ordered(own, {"empty_documents": 0, "sources": sources})


def _manifest(
    arguments: dict,
    info: TokenizerInfo,
    dtype: str,
    shards: dict[str, list[ShardInfo]],
    token_counts: dict[str, np.ndarray],
) -> dict:
    splits = {
        split: {**_sums(found), "shards": [shard.to_json() for shard in found]}
        for split, found in shards.items()
    }
    listed = [shard for entry in splits.values() for shard in entry["shards"]]
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": cat_lm.__version__,
        "fingerprint": fingerprint(listed, info.sha256),
        "source": arguments["source"],
        "tokenizer": asdict(info),
        "dtype": dtype,
        "unigram_loss": unigram_loss(token_counts["train"], token_counts["validation"]),
        "splits": splits,
        "arguments": arguments,
    }


def _ordered(own: dict, middle: dict) -> dict:
    last = {key: own.pop(key) for key in ("splits", "arguments")}
    return {**own, **middle, **last}


def _sums(infos: Iterable[ShardInfo]) -> dict[str, int]:
    found = list(infos)
    return {key: sum(getattr(info, key) for info in found) for key in COUNTS}


def _selection(assembly: Assembly) -> dict:
    """Return how often each set's training documents occur, and below which hash once more."""
    return {
        name: {
            "whole": copies.whole,
            "subset_below": None if copies.cut is None else copies.cut.place / PLACES,
        }
        for name, copies in sorted(assembly.selection.train.items())
    }


def print_counts(manifest: dict) -> None:
    """Print the counts of the splits and of the sets, and warn of little validation text."""
    for split, counts in manifest["splits"].items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes']:,} bytes of text, "
            f"{counts['bytes'] / max(1, counts['tokens']):.2f} bytes a token, "
            f"{len(counts['shards'])} shards"
        )
    total = manifest["splits"]["train"]["tokens"]
    for name, by_split in manifest["sources"].items():
        parts = ", ".join(f"{split} {c['tokens']:,} tokens" for split, c in by_split.items())
        train = by_split.get("train")
        share = f", {train['tokens'] / total:.2%} of train" if train else ""
        print(f"  {name}: {parts}{share}{_copies(manifest, name)}")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token")
    _warn_of_small_validation(manifest["splits"])


def print_summary(manifest: dict, is_slimpajama: bool) -> None:
    """Print the counts of chosen documents, and what was left out of them."""
    print_counts(manifest)
    if manifest["empty_documents"]:
        print(f"left out: {manifest['empty_documents']:,} documents without text")
    if manifest["malformed_documents"]:
        print(f"left out: {manifest['malformed_documents']:,} malformed records, see malformed.log")
    found = {
        name: sum(counts["documents"] for counts in by_split.values())
        for name, by_split in sorted(manifest["input"].items())
    }
    for name, number in found.items():
        if name not in manifest["sources"]:
            print(f"left out: {number:,} documents of {name}")
        if is_slimpajama and name not in (*KNOWN_SETS, UNKNOWN_SET):
            print(f"note: {number:,} documents of a set that SlimPajama does not have: {name!r}")


def _warn_of_small_validation(splits: dict[str, Any]) -> None:
    documents, tokens = (splits["validation"][key] for key in ("documents", "tokens"))
    # The last part of a single text stands for it, as long as there is enough.
    is_alone = documents == 1 and splits["train"]["documents"] > 1
    if is_alone or tokens < FEW_TOKENS:
        what = "a single document" if documents == 1 else f"{documents:,} documents"
        print(
            f"warning: the validation split is {what} of {tokens:,} tokens, too little to compare "
            "models by; hold out more text"
        )


def _copies(manifest: dict, name: str) -> str:
    copies = manifest.get("selection", {}).get(name)
    if copies is None or (copies["whole"] == 1 and copies["subset_below"] is None):
        return ""
    words = [f"{copies['whole']} times"] if copies["whole"] else []
    if copies["subset_below"] is not None:
        words.append(f"its documents with hash places up to {copies['subset_below']:.6f}")
    return f" ({' and '.join(words)})"


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Return nats per validation token under the training split's add-one-smoothed unigram model.

    `train` and `validation` count each token of a split: int64 [vocab_size].
    """
    log_probability = np.log(train + 1.0) - np.log(train.sum() + len(train))
    return float(-(validation * log_probability).sum() / validation.sum())
