"""Build the manifest of prepared data, and print a summary of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

import cat_lm
from cat_lm.data.manifest import FORMAT_VERSION, fingerprint
from cat_lm.data.shards import ShardInfo
from cat_lm.data.tokenizers import TokenizerInfo
from data_prep.sources.base import UNKNOWN_SET
from data_prep.sources.repository import KNOWN_SETS

# Below this number of validation tokens, the loss depends on the choice of few documents.
FEW_TOKENS = 10_000
COUNTS = ("documents", "tokens", "bytes")


def build_manifest(
    arguments: dict,
    info: TokenizerInfo,
    dtype: np.dtype,
    shards: dict[str, list[ShardInfo]],
    token_counts: dict[str, np.ndarray],
    contents: dict[str, Any],
) -> dict:
    """Return the manifest, which does not depend on machines, workers or interruptions.

    Args:
        arguments: the arguments of the preparation, with a description of the `source`.
        shards: the shards of each split.
        token_counts: the number of each token in each split, int64 [vocab_size].
        contents: further entries about documents and sets.
    """
    splits = {
        split: {**sum_counts(found), "shards": [shard.to_json() for shard in found]}
        for split, found in shards.items()
    }
    for split, counts in splits.items():
        found = int(token_counts[split][info.eod_id]), int(token_counts[split].sum())
        if found != (counts["documents"], counts["tokens"]):
            raise RuntimeError(f"{split}: {found} EOD tokens and tokens, not {counts}")
    listed = [shard for entry in splits.values() for shard in entry["shards"]]
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": cat_lm.__version__,
        "fingerprint": fingerprint(listed, info.sha256),
        "source": arguments["source"],
        "tokenizer": asdict(info),
        "dtype": dtype.name,
        "unigram_loss": unigram_loss(token_counts["train"], token_counts["validation"]),
        **contents,
        "splits": splits,
        "arguments": arguments,
    }


def sum_counts(infos: Iterable[ShardInfo]) -> dict[str, int]:
    """Return the sums of documents, tokens and bytes of shards."""
    found = list(infos)
    return {key: sum(getattr(info, key) for info in found) for key in COUNTS}


def print_counts(manifest: dict) -> None:
    """Print the counts of splits and sets, and a warning about too little validation text."""
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
        print(f"  {name}: {parts}{share}{_format_copies(manifest, name)}")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token")
    documents, tokens = (manifest["splits"]["validation"][key] for key in ("documents", "tokens"))
    # If the training split is a single document too, its end is a fair validation text.
    is_alone = documents == 1 and manifest["splits"]["train"]["documents"] > 1
    if is_alone or tokens < FEW_TOKENS:
        what = "a single document" if documents == 1 else f"{documents:,} documents"
        print(
            f"warning: the validation split is {what} of {tokens:,} tokens, too little to compare "
            "models by; hold out more text"
        )


def print_summary(manifest: dict, is_slimpajama: bool) -> None:
    """Print the counts of the selected documents and of those that were left out."""
    print_counts(manifest)
    if manifest["empty_documents"]:
        print(f"left out: {manifest['empty_documents']:,} documents without text")
    if manifest["malformed_documents"]:
        print(f"left out: {manifest['malformed_documents']:,} malformed records, see malformed.log")
    for name, by_split in sorted(manifest["input"].items()):
        number = sum(counts["documents"] for counts in by_split.values())
        if name not in manifest["sources"]:
            print(f"left out: {number:,} documents of {name}")
        if is_slimpajama and name not in (*KNOWN_SETS, UNKNOWN_SET):
            print(f"note: {number:,} documents of a set that SlimPajama does not have: {name!r}")


def _format_copies(manifest: dict, name: str) -> str:
    copies = manifest.get("selection", {}).get(name)
    if copies is None or (copies["whole"] == 1 and copies["subset_below"] is None):
        return ""
    words = [f"{copies['whole']} times"] if copies["whole"] else []
    if copies["subset_below"] is not None:
        words.append(f"its documents with hash places up to {copies['subset_below']:.6f}")
    return f" ({' and '.join(words)})"


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Return the validation loss, in nats per token, of an add-one-smoothed unigram model.

    `train` and `validation` have the number of each token in a split, int64 [vocab_size].
    """
    log_probability = np.log(train + 1.0) - np.log(train.sum() + len(train))
    return float(-(validation * log_probability).sum() / validation.sum())
