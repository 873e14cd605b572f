"""Making a prepared folder of token shards that others have written."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256, write_json
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.data.manifest import MANIFEST, SPLITS
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import Shard, ShardInfo, write_index
from cat_lm.data.tokenizers import TokenizerInfo, build_tokenizer, check_spec, spec_sha256
from cat_lm.data.verified import Notes, note_line
from data_prep.assemble.manifest import manifest_of, print_counts
from data_prep.common.progress import TextProgress
from data_prep.encode.plan import TOKENIZER
from data_prep.megatron.validate import TextBytes, count_tokens, document_lengths, scan

COPY_BLOCK = 1 << 24


@dataclass(frozen=True)
class Pair:
    """A `.bin/.idx` pair on the command line: the set's name, its split, and the files."""

    set: str
    split: str
    shard: Shard


@dataclass(frozen=True)
class Piece:
    """A shard to be: documents that lie one behind the other in a pair."""

    set: str
    split: str
    shard: Shard
    start: int  # in tokens
    lengths: np.ndarray
    counts: np.ndarray  # of each id
    text_bytes: int
    bin_sha256: str | None  # None for a part of a file
    read_as: os.stat_result  # the pair's .bin, as it was before it was read


def adopt(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for and print a summary. Raises UserError."""
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
    with atomic_folder(out, flag="--out") as made:
        manifest = _make(made, pairs, arguments)
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


def _make(made: Path, pairs: list[Pair], arguments: argparse.Namespace) -> dict:
    info = build_tokenizer(arguments.tokenizer, made / TOKENIZER, lambda: (), arguments.eod_token)
    pieces = _examine_all(pairs, info, made, arguments)
    numbers = dict.fromkeys(SPLITS, 0)
    adopted: list[tuple[Piece, ShardInfo]] = []
    notes: list[str] = []
    for piece in pieces:
        name = f"{piece.split}-{numbers[piece.split]:05d}"
        numbers[piece.split] += 1
        shard, lines = _settle(piece, name, made, arguments.link)
        adopted.append((piece, shard))
        notes += lines
    manifest = _manifest(adopted, info, arguments)
    write_json(made / MANIFEST, manifest)
    for split in SPLITS:
        open_corpus(made, split)
    Notes(made).add(notes)
    return manifest


def _examine_all(
    pairs: list[Pair], info: TokenizerInfo, folder: Path, arguments: argparse.Namespace
) -> list[Piece]:
    pieces: list[Piece] = []
    text = TextBytes(folder / TOKENIZER, info)
    last = max(index for index, pair in enumerate(pairs) if pair.split == "train")
    total = sum(pair.shard.num_tokens * pair.shard.dtype.itemsize for pair in pairs)
    with TextProgress("reading", total, "of shards") as progress:
        for index, pair in enumerate(pairs):
            held_out = (arguments.validation_documents or 0) if index == last else 0
            pieces += _examine(pair, info, text, arguments.documents, held_out, progress.update)
    return pieces


def _examine(
    pair: Pair,
    info: TokenizerInfo,
    text: TextBytes,
    documents: str,
    held_out: int,
    report: Callable[[int], None],
) -> list[Piece]:
    """Return the shards that a pair becomes: two where `held_out` documents are cut off."""
    shard = pair.shard
    before = shard.bin_path.stat()
    tokens = scan(shard, info, documents == "eod", report)
    lengths = document_lengths(shard, tokens, info, documents)
    text.check(shard, lengths)
    if not held_out:
        size = text.count(shard, lengths, tokens.counts)
        own = (0, lengths, tokens.counts, size, tokens.bin_sha256, before)
        return [Piece(pair.set, pair.split, shard, *own)]
    if held_out >= len(lengths):
        raise UserError(
            f"--validation-documents {held_out}: {shard.bin_path} has {len(lengths)} documents; "
            "leave some for training"
        )
    cut = int(lengths[:-held_out].sum(dtype=np.int64))
    counts = count_tokens(shard, cut, info.vocab_size)
    train = (0, lengths[:-held_out], tokens.counts - counts)
    return [
        Piece(
            pair.set,
            split,
            shard,
            start,
            own,
            seen,
            text.count(shard, own, seen, start),
            None,
            before,
        )
        for split, (start, own, seen) in (
            ("train", train),
            ("validation", (cut, lengths[-held_out:], counts)),
        )
    ]


def _settle(piece: Piece, name: str, folder: Path, link: str) -> tuple[ShardInfo, list[str]]:
    """Put a shard into its place; return its entry in the manifest, and the notes of its files."""
    shard, target, index = piece.shard, folder / f"{name}.bin", folder / f"{name}.idx"
    tokens = int(piece.lengths.sum(dtype=np.int64))
    digest = piece.bin_sha256
    if link == "copy":
        size = shard.dtype.itemsize
        digest = _copy(shard.bin_path, target, piece.start * size, tokens * size)
    else:
        _link(shard.bin_path, target, link)
    info = ShardInfo(
        name=name,
        documents=len(piece.lengths),
        tokens=tokens,
        bytes=piece.text_bytes,
        bin_sha256=digest,
        idx_sha256=write_index(index, shard.dtype, piece.lengths),
    )
    if sha256(index) != info.idx_sha256:
        raise UserError(f"{index}: reads back different; check the disk")
    # What was linked is what was read, unless it has changed since.
    state = target.stat() if link == "copy" else piece.read_as
    notes = (target, state, info.bin_sha256), (index, index.stat(), info.idx_sha256)
    return info, [note_line(path.name, *note) for path, *note in notes]


def _link(source: Path, target: Path, link: str) -> None:
    try:
        if link == "hard":
            os.link(source.resolve(), target)
        else:
            target.symlink_to(source.resolve())
    except OSError as error:
        reason = f"{source}: cannot be linked into --out ({error.strerror})"
        others = "--link symbolic or --link copy" if link == "hard" else "--link copy"
        raise UserError(f"{reason}; give {others}") from None


def _copy(source: Path, target: Path, start: int, size: int) -> str:
    """Copy bytes [start, start + size), compare the copy, and return their SHA-256."""
    digest, left = hashlib.sha256(), size
    with open(source, "rb") as stream, open(target, "wb") as copy:
        stream.seek(start)
        while left and (block := stream.read(min(left, COPY_BLOCK))):
            copy.write(block)
            digest.update(block)
            left -= len(block)
        copy.flush()
        os.fsync(copy.fileno())
    if left or sha256(target) != digest.hexdigest():
        raise UserError(f"{source}: its copy reads back different; check the disk")
    return digest.hexdigest()


def _manifest(
    adopted: list[tuple[Piece, ShardInfo]], info: TokenizerInfo, arguments: argparse.Namespace
) -> dict:
    sets: dict[str, dict[str, list[ShardInfo]]] = {}
    for piece, shard in adopted:
        by_split = sets.setdefault(piece.set, {split: [] for split in SPLITS})
        by_split[piece.split].append(shard)
    counts = {
        split: np.sum([piece.counts for piece, _ in adopted if piece.split == split], axis=0)
        for split in SPLITS
    }
    dtype = adopted[0][0].shard.dtype
    # The source's description is the same wherever the files lie.
    listing = "".join(f"{p.set} {p.split} {shard.bin_sha256}\n" for p, shard in adopted)
    source = {
        "kind": "megatron",
        "files": len(adopted),
        "file_bytes": sum(shard.tokens * dtype.itemsize for _, shard in adopted),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
    said = {
        "source": source,
        "tokenizer": arguments.tokenizer,
        "tokenizer_sha256": spec_sha256(arguments.tokenizer),
        "eod_token": arguments.eod_token,
        "documents": arguments.documents,
        "validation_documents": arguments.validation_documents,
    }
    return manifest_of(sets, counts, info, dtype, said)
