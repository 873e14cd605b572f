"""Make a prepared folder from token shards of other tools."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.data.hub_tokenizers import pin
from cat_lm.data.manifest import MANIFEST, SPLITS
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import Shard, ShardInfo, ShardWriter, write_index
from cat_lm.data.tokenizers import TokenizerInfo, build_tokenizer, check_spec, spec_sha256
from cat_lm.data.verified import Notes, note_line
from data_prep.assemble.manifest import build_manifest, print_counts, sum_counts
from data_prep.common.progress import progress_bar
from data_prep.encode.plan import TOKENIZER
from data_prep.megatron.validate import (
    BLOCK_TOKENS,
    TextBytes,
    count_tokens,
    document_lengths,
    scan_tokens,
)


@dataclass(frozen=True)
class Pair:
    """A `.bin/.idx` pair of the command line, with its set and split."""

    set: str
    split: str
    shard: Shard


@dataclass
class Piece:
    """Consecutive documents of a pair, which become one shard."""

    set: str
    split: str
    shard: Shard
    start: int  # first token in the pair
    lengths: np.ndarray
    counts: np.ndarray  # number of each token id
    text_bytes: int
    bin_sha256: str  # checksum of the pair's .bin
    read_as: os.stat_result  # status of the pair's .bin before it was read
    info: ShardInfo | None = None  # set when the shard is written


def adopt(arguments: argparse.Namespace) -> None:
    """Make the prepared folder and print a summary. Raises UserError."""
    out: Path = arguments.out
    check_output(out)
    check_spec(arguments.tokenizer)
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose another folder")
    pairs = [
        *(_open_pair(text, "train") for text in arguments.prefixes),
        *(_open_pair(text, "validation") for text in arguments.validation),
    ]
    _check_pairs(pairs)
    arguments.tokenizer = pin(arguments.tokenizer)
    with atomic_folder(out, flag="--out") as made:
        manifest = _write_data(made, pairs, arguments)
    print_counts(manifest)
    print(f"{out}: complete")


def _open_pair(text: str, split: str) -> Pair:
    name, separator, path = text.partition("=")
    prefix = Path(path if separator else text)
    if not prefix.name or (separator and (not name or not path)):
        raise UserError(f"{text!r}: give [NAME=]PREFIX")
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    for suffix in (".bin", ".idx"):
        if not prefix.with_name(prefix.name + suffix).is_file():
            raise UserError(f"{prefix}{suffix}: no such file; give a path without .bin and .idx")
    return Pair(name if separator else prefix.name, split, Shard(prefix))


def _check_pairs(pairs: list[Pair]) -> None:
    seen: dict[Path, Pair] = {}
    first = pairs[0].shard
    for pair in pairs:
        file = pair.shard.bin_path.resolve()
        if file in seen:
            raise UserError(f"{pair.shard.bin_path}: given twice, as {seen[file].split} data too")
        seen[file] = pair
        if pair.shard.dtype != first.dtype:
            raise UserError(
                f"{pair.shard.idx_path}: holds {pair.shard.dtype.name} tokens, {first.idx_path} "
                f"{first.dtype.name}; a folder has one kind: adopt them into two (data.mixture "
                "reads several)"
            )


def _write_data(made: Path, pairs: list[Pair], arguments: argparse.Namespace) -> dict:
    info = build_tokenizer(arguments.tokenizer, made / TOKENIZER, lambda: (), arguments.eod_token)
    pieces: list[Piece] = []
    text = TextBytes(made / TOKENIZER, info)
    last = [pair for pair in pairs if pair.split == "train"][-1]
    total = sum(pair.shard.num_tokens * pair.shard.dtype.itemsize for pair in pairs)
    with progress_bar("reading shards", total) as bar:
        for pair in pairs:
            held_out = (arguments.validation_documents or 0) if pair is last else 0
            pieces += _read_pair(pair, info, text, arguments.documents, held_out, bar.update)
    numbers, notes = Counter(), Notes(made)
    for piece in pieces:
        name = f"{piece.split}-{numbers[piece.split]:05d}"
        numbers[piece.split] += 1
        notes.add(_write_shard(piece, name, made, arguments.link))
    manifest = _build_manifest(pieces, info, arguments)
    write_json(made / MANIFEST, manifest)
    for split in SPLITS:
        open_corpus(made, split)
    return manifest


def _read_pair(
    pair: Pair, info: TokenizerInfo, text: TextBytes, documents: str, held_out: int, report
) -> list[Piece]:
    """Return the pieces of a pair, two if its last `held_out` documents are for validation."""
    shard = pair.shard
    before = shard.bin_path.stat()
    tokens = scan_tokens(shard, info, documents == "eod", report)
    lengths = document_lengths(shard, tokens, info, documents)
    text.check(shard, lengths)
    if held_out >= len(lengths):
        raise UserError(
            f"--validation-documents {held_out}: {shard.bin_path} has {len(lengths)} documents; "
            "leave some for training"
        )
    parts = [(pair.split, 0, lengths, tokens.counts)]
    if held_out:
        cut = int(lengths[:-held_out].sum(dtype=np.int64))
        counts = count_tokens(shard, cut, info.vocab_size)
        train = (0, lengths[:-held_out], tokens.counts - counts)
        parts = [("train", *train), ("validation", cut, lengths[-held_out:], counts)]
    return [
        Piece(
            *(pair.set, split, shard, start, own, counts),
            *(text.count(shard, own, counts, start), tokens.bin_sha256, before),
        )
        for split, start, own, counts in parts
    ]


def _write_shard(piece: Piece, name: str, folder: Path, link: str) -> list[str]:
    """Write or link a shard into the folder; return the notes of its verified files."""
    shard, target, index = piece.shard, folder / f"{name}.bin", folder / f"{name}.idx"
    tokens = int(piece.lengths.sum(dtype=np.int64))
    if link == "copy":
        with ShardWriter(folder, name, shard.dtype) as writer:
            for start in range(piece.start, piece.start + tokens, BLOCK_TOKENS):
                block = shard.read(start, min(start + BLOCK_TOKENS, piece.start + tokens))
                writer.write(block, (), ())
            writer.write((), piece.lengths, [piece.text_bytes])
        piece.info, state = writer.info, target.stat()
        if tokens == shard.num_tokens and piece.info.bin_sha256 != piece.bin_sha256:
            raise UserError(f"{shard.bin_path}: reads back different; check the disk")
    else:
        _link_file(shard.bin_path, target, link)
        # Note the status before reading: the note is invalid if the file has changed since.
        state = piece.read_as
        counts = (len(piece.lengths), tokens, piece.text_bytes)
        digest = write_index(index, shard.dtype, piece.lengths)
        piece.info = ShardInfo(name, *counts, piece.bin_sha256, digest)
    return [
        note_line(target.name, state, piece.info.bin_sha256),
        note_line(index.name, index.stat(), piece.info.idx_sha256),
    ]


def _link_file(source: Path, target: Path, link: str) -> None:
    try:
        if link == "hard":
            os.link(source.resolve(), target)
        else:
            target.symlink_to(source.resolve())
    except OSError as error:
        reason = f"{source}: cannot be linked into --out ({error.strerror})"
        others = "--link symbolic or --link copy" if link == "hard" else "--link copy"
        raise UserError(f"{reason}; give {others}") from None


def _build_manifest(
    pieces: list[Piece], info: TokenizerInfo, arguments: argparse.Namespace
) -> dict:
    shards = {split: [p.info for p in pieces if p.split == split] for split in SPLITS}
    sets = sorted({piece.set for piece in pieces})
    sources = {
        name: {
            split: sum_counts(own)
            for split in SPLITS
            if (own := [p.info for p in pieces if (p.set, p.split) == (name, split)])
        }
        for name in sets
    }
    counts = {
        split: np.sum([piece.counts for piece in pieces if piece.split == split], axis=0)
        for split in SPLITS
    }
    dtype = pieces[0].shard.dtype
    # The description of the source does not depend on the files' location.
    listing = "".join(f"{p.set} {p.split} {p.info.bin_sha256}\n" for p in pieces)
    source = {
        "kind": "megatron",
        "files": len(pieces),
        "file_bytes": sum(piece.info.tokens * dtype.itemsize for piece in pieces),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
    given = {
        "source": source,
        "tokenizer": arguments.tokenizer,
        "tokenizer_sha256": spec_sha256(arguments.tokenizer),
        "eod_token": arguments.eod_token,
        "documents": arguments.documents,
        "validation_documents": arguments.validation_documents,
    }
    contents = {"empty_documents": 0, "sources": sources}
    return build_manifest(given, info, dtype, shards, counts, contents)
