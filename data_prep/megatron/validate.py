"""Checks of a `.bin/.idx` pair made elsewhere, before it is taken for prepared data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.shards import MAX_DOCUMENT_TOKENS, Shard
from cat_lm.data.tokenizers import TokenizerInfo

BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Tokens:
    """Findings of one pass over a `.bin`: counts of each id, SHA-256, ends of documents."""

    counts: np.ndarray
    bin_sha256: str
    eod_ends: np.ndarray | None


def scan(
    shard: Shard, info: TokenizerInfo, with_ends: bool, report: Callable[[int], None]
) -> Tokens:
    """Reads all tokens of a shard once; `report` is told of the bytes of each block.

    `with_ends` asks for the positions behind each EOD, int64. Raises `UserError` for an id that the
    vocabulary does not have, for data without any EOD, and for none at all.
    """
    if not shard.num_sequences or not shard.num_tokens:
        raise UserError(f"{shard.idx_path}: empty, there is no token in it")
    counts = np.zeros(info.vocab_size, dtype=np.int64)
    digest = hashlib.sha256()
    ends = []
    for start in range(0, shard.num_tokens, BLOCK_TOKENS):
        block = shard.read(start, min(start + BLOCK_TOKENS, shard.num_tokens))
        lowest, highest = int(block.min()), int(block.max())
        if lowest < 0 or highest >= info.vocab_size:
            raise UserError(
                f"{shard.bin_path}: id {lowest if lowest < 0 else highest} is not in the "
                f"vocabulary of {info.spec} ({info.vocab_size} ids); name the tokenizer that made "
                "the data"
            )
        counts += np.bincount(block, minlength=info.vocab_size)
        digest.update(block.data)
        if with_ends:
            ends.append(np.flatnonzero(block == info.eod_id) + (start + 1))
        report(block.nbytes)
    if not counts[info.eod_id]:
        raise UserError(
            f"{shard.bin_path}: no token is {info.eod_token} (id {info.eod_id}), the end of a "
            "document: its documents would run into each other. Data made without --append-eod are "
            "so, Pythia's Pile among them; prepare them again with it (or mend --eod-token)"
        )
    return Tokens(counts, digest.hexdigest(), np.concatenate(ends) if with_ends else None)


def count_tokens(shard: Shard, start: int, vocab_size: int) -> np.ndarray:
    """Return how often each id comes from token `start` on, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(start, shard.num_tokens, BLOCK_TOKENS):
        block = shard.read(first, min(first + BLOCK_TOKENS, shard.num_tokens))
        counts += np.bincount(block, minlength=vocab_size)
    return counts


def document_lengths(
    shard: Shard, tokens: Tokens, info: TokenizerInfo, documents: str
) -> np.ndarray:
    """The tokens of each document, EOD included, int32: by `documents` (marks, sequences, eod).

    Raises `UserError` where the index does not cover the `.bin` from end to end in order, or where
    a document does not end with EOD, or has one inside.
    """
    sequence_ends = _sequence_ends(shard)
    if documents == "eod":
        ends = tokens.eod_ends
    elif documents == "sequences":
        ends = sequence_ends
    else:
        ends = _marked_ends(shard, sequence_ends)
    lengths = np.diff(ends, prepend=0)
    if (lengths < 1).any():
        raise UserError(f"{shard.idx_path}: document {int(np.argmin(lengths))} is empty")
    _check_ends(shard, ends, int(tokens.counts[info.eod_id]), info)
    if lengths.max() > MAX_DOCUMENT_TOKENS:
        raise UserError(f"{shard.idx_path}: a document of {lengths.max()} tokens is too long")
    return lengths.astype(np.int32)


def _sequence_ends(shard: Shard) -> np.ndarray:
    """The end of each sequence, in tokens, int64; they must lie one behind the other."""
    lengths = np.asarray(shard.lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    gaps = shard.pointers != (ends - lengths) * shard.dtype.itemsize
    if gaps.any() or (lengths < 0).any():
        raise UserError(
            f"{shard.idx_path}: sequence {int(np.argmax(gaps))} does not lie behind the one before "
            "it; only indices that list the whole .bin in order can be adopted"
        )
    if ends[-1] != shard.num_tokens:
        raise UserError(
            f"{shard.idx_path}: lists {ends[-1]} tokens, {shard.bin_path.name} has "
            f"{shard.num_tokens}; one of the two is cut short or another's"
        )
    return ends


def _marked_ends(shard: Shard, sequence_ends: np.ndarray) -> np.ndarray:
    marks = shard.document_marks if shard.num_documents > 0 else np.zeros(1, dtype=np.int64)
    if len(marks) < 2:
        raise UserError(
            f"{shard.idx_path}: marks no documents, as files merged by GPT-NeoX; give "
            "--documents sequences (each sequence is one) or eod (what ends with EOD is one)"
        )
    if marks[0] != 0 or marks[-1] != shard.num_sequences or (np.diff(marks) < 1).any():
        raise UserError(
            f"{shard.idx_path}: its document marks do not lead from 0 to {shard.num_sequences} in "
            "steps; give --documents sequences or eod to go without them"
        )
    return sequence_ends[marks[1:] - 1]


def _check_ends(shard: Shard, ends: np.ndarray, eods: int, info: TokenizerInfo) -> None:
    if ends[-1] != shard.num_tokens:
        raise UserError(
            f"{shard.bin_path}: {shard.num_tokens - ends[-1]} tokens follow the last "
            f"{info.eod_token}; the data are cut short, or --eod-token is another"
        )
    ended = int((shard.tokens[ends - 1] == info.eod_id).sum())
    if ended != len(ends):
        raise UserError(
            f"{shard.bin_path}: {len(ends) - ended} of {len(ends)} documents do not end with "
            f"{info.eod_token} (id {info.eod_id}); is the tokenizer another, or what a document "
            "is (--documents)?"
        )
    if eods != len(ends):
        raise UserError(
            f"{shard.bin_path}: {eods} tokens {info.eod_token} for {len(ends)} documents, some lie "
            "inside of documents; --documents eod ends a document at each"
        )
