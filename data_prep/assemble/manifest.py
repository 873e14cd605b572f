"""The manifest of prepared data, and the summary of it that is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

import cat_lm
from cat_lm.data.manifest import FORMAT_VERSION, SPLITS, fingerprint
from cat_lm.data.shards import ShardInfo
from cat_lm.data.tokenizers import TokenizerInfo
from data_prep.assemble.shard_plan import Assembly
from data_prep.encode.encoding import PLACES
from data_prep.sources.base import LeftOut

# Of validation tokens: below, the loss depends on the few documents that happen to be held out.
FEW_TOKENS = 10_000


def build_manifest(
    identity: dict,
    info: TokenizerInfo,
    dtype: str,
    assembly: Assembly,
    shards: dict[str, list[ShardInfo]],
    token_counts: dict[str, np.ndarray],
    left_out: Sequence[LeftOut],
) -> dict:
    """Everything there is to say of the data; the same for every machine, worker and kill.

    `token_counts` are those of each split, int64 [vocab_size]; `left_out` is what the source has
    of files that are not read.
    """
    splits = {}
    for split in SPLITS:
        listed = [shard.to_json() for shard in shards[split]]
        sums = {key: sum(s[key] for s in listed) for key in ("documents", "tokens", "bytes")}
        eods = int(token_counts[split][info.eod_id])
        if eods != sums["documents"] or int(token_counts[split].sum()) != sums["tokens"]:
            raise RuntimeError(f"{split}: {eods} EOD tokens for {sums['documents']} documents")
        splits[split] = {**sums, "shards": listed}
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": cat_lm.__version__,
        "fingerprint": fingerprint(
            [s for split in SPLITS for s in splits[split]["shards"]], info.sha256
        ),
        "source": identity["source"],
        "tokenizer": asdict(info),
        "dtype": dtype,
        "unigram_loss": unigram_loss(token_counts["train"], token_counts["validation"]),
        "empty_documents": assembly.empty,
        "malformed_documents": assembly.malformed,
        "sources": {name: dict(by_split) for name, by_split in sorted(assembly.counts.items())},
        "input": assembly.seen,
        **({"left_out": [asdict(entry) for entry in left_out]} if left_out else {}),
        "selection": _selection(assembly),
        "splits": splits,
        "arguments": identity,
    }


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
    splits = {}
    for split in token_counts:
        infos = [shard for by_split in sets.values() for shard in by_split.get(split, ())]
        infos.sort(key=lambda shard: shard.name)  # the order in which they were given
        splits[split] = {**_sums(infos), "shards": [shard.to_json() for shard in infos]}
    shards = [shard for entry in splits.values() for shard in entry["shards"]]
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": cat_lm.__version__,
        "fingerprint": fingerprint(shards, info.sha256),
        "source": arguments["source"],
        "tokenizer": asdict(info),
        "dtype": dtype.name,
        "unigram_loss": unigram_loss(token_counts["train"], token_counts["validation"]),
        "empty_documents": 0,
        "sources": {
            name: {split: _sums(own) for split, own in by_split.items() if own}
            for name, by_split in sorted(sets.items())
        },
        "splits": splits,
        "arguments": arguments,
    }


def _sums(infos: list[ShardInfo]) -> dict:
    return {key: sum(getattr(i, key) for i in infos) for key in ("documents", "tokens", "bytes")}


def print_counts(manifest: dict) -> None:
    """Print the counts of such data."""
    for split, counts in manifest["splits"].items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes']:,} bytes of text, {len(counts['shards'])} shards"
        )
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token")
    _warn_of_small_validation(manifest["splits"])


def _selection(assembly: Assembly) -> dict:
    """Return how often each set's training documents occur, and below which hash once more."""
    return {
        name: {
            "whole": copies.whole,
            "subset_below": None if copies.cut is None else copies.cut.place / PLACES,
        }
        for name, copies in sorted(assembly.selection.train.items())
    }


def print_summary(manifest: dict, known_sets: tuple[str, ...]) -> None:
    """The counts of the data, and what was left out of them."""
    for split, counts in manifest["splits"].items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes']:,} bytes, {counts['bytes'] / counts['tokens']:.2f} bytes a token, "
            f"{len(counts['shards'])} shards"
        )
    total = manifest["splits"]["train"]["tokens"]
    for name, by_split in manifest["sources"].items():
        parts = ", ".join(f"{split} {c['tokens']:,} tokens" for split, c in by_split.items())
        share = (
            f", {by_split['train']['tokens'] / total:.2%} of train" if "train" in by_split else ""
        )
        print(f"  {name}: {parts}{share}{_copies(manifest, name)}")
    _print_left_out(manifest)
    unknown = sorted(set(manifest["input"]) - set(known_sets)) if known_sets else []
    for name in unknown:
        number = sum(c["documents"] for c in manifest["input"][name].values())
        print(f"note: {number:,} documents of a set that SlimPajama does not have: {name!r}")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token")
    _warn_of_small_validation(manifest["splits"])


def _warn_of_small_validation(splits: dict) -> None:
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
    copies = manifest["selection"].get(name)
    if copies is None or (copies["whole"] == 1 and copies["subset_below"] is None):
        return ""
    words = [f"{copies['whole']} times"] if copies["whole"] else []
    if copies["subset_below"] is not None:
        words.append(f"its documents with hash places up to {copies['subset_below']:.6f}")
    return f" ({' and '.join(words)})"


def _print_left_out(manifest: dict) -> None:
    if manifest["empty_documents"]:
        print(f"left out: {manifest['empty_documents']:,} documents without text")
    if manifest["malformed_documents"]:
        print(f"left out: {manifest['malformed_documents']:,} malformed records, see malformed.log")
    for name in sorted(set(manifest["input"]) - set(manifest["sources"])):
        number = sum(counts["documents"] for counts in manifest["input"][name].values())
        print(f"left out: {number:,} documents of {name}")


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Nats per validation token under the training split's add-one-smoothed unigram model.

    `train` and `validation` count each token of a split: int64 [vocab_size].
    """
    log_probability = np.log(train + 1.0) - np.log(train.sum() + len(train))
    return float(-(validation * log_probability).sum() / validation.sum())
