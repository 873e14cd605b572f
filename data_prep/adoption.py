"""Making a prepared folder of token shards that others have written."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import cat_lm
from cat_lm.data.corpus import FORMAT_VERSION, MANIFEST, SPLITS, TokenCorpus, fingerprint
from cat_lm.data.shards import Shard, ShardInfo, write_index
from cat_lm.data.tokenizers import TokenizerInfo, build_tokenizer, check_spec, spec_sha256
from cat_lm.errors import UserError
from cat_lm.files import sha256, sync_directory, write_json
from data_prep.foreign import document_lengths, scan
from data_prep.output import TOKENIZER
from data_prep.progress import TextProgress
from data_prep.text_bytes import TextBytes
from data_prep.unigram import unigram_loss


@dataclass(frozen=True)
class Pair:
    """A `.bin/.idx` pair on the command line: the set's name, its split, and the files."""

    set: str
    split: str
    shard: Shard


@dataclass(frozen=True)
class Adopted:
    """A pair that has its place: what the manifest says of it, and the count of each id."""

    pair: Pair
    info: ShardInfo
    counts: np.ndarray


def adopt(arguments: argparse.Namespace) -> None:
    """Does what the command line asks for and prints a summary. Raises `UserError`."""
    out: Path = arguments.out
    check_spec(arguments.tokenizer)
    _check_free(out)
    pairs = [
        *(_open_pair(text, "train") for text in arguments.prefixes),
        *(_open_pair(text, "validation") for text in arguments.validation),
    ]
    _check_pairs(pairs)
    out.parent.mkdir(parents=True, exist_ok=True)
    making = out.with_name(f".{out.name}.adopt.tmp")  # a kill leaves this, the next run removes it
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        info = build_tokenizer(
            arguments.tokenizer, making / TOKENIZER, lambda: (), arguments.eod_token
        )
        adopted = _adopt_all(pairs, info, making, arguments)
        manifest = _manifest(adopted, info, arguments)
        write_json(making / MANIFEST, manifest)
        for split in SPLITS:
            TokenCorpus.open(making, split)
        os.rename(making, out)
        sync_directory(out.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    _print_summary(out, manifest)


def _check_free(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose another folder")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, a folder is needed")


def _open_pair(text: str, split: str) -> Pair:
    name, separator, path = text.partition("=")
    prefix = Path(path if separator else text)
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    if separator and (not name or not path):
        raise UserError(f"{text}: give [NAME=]PREFIX")
    for suffix in (".bin", ".idx"):
        if not prefix.with_name(prefix.name + suffix).is_file():
            raise UserError(f"{prefix}{suffix}: no such file; give a path without .bin and .idx")
    return Pair(name if separator else prefix.name, split, Shard(prefix))


def _check_pairs(pairs: list[Pair]) -> None:
    seen: dict[Path, Pair] = {}
    for pair in pairs:
        file = pair.shard.bin_path.resolve()
        if file in seen:
            raise UserError(f"{pair.shard.bin_path}: given twice, as {seen[file].split} data too")
        seen[file] = pair
        first = pairs[0].shard
        if pair.shard.dtype != first.dtype:
            raise UserError(
                f"{pair.shard.idx_path}: holds {pair.shard.dtype.name} tokens, {first.idx_path} "
                f"{first.dtype.name}; a folder has one kind: adopt them into two (data.mixture "
                "reads several)"
            )


def _adopt_all(
    pairs: list[Pair], info: TokenizerInfo, folder: Path, arguments: argparse.Namespace
) -> list[Adopted]:
    numbers = dict.fromkeys(SPLITS, 0)
    adopted = []
    total = sum(pair.shard.num_tokens * pair.shard.dtype.itemsize for pair in pairs)
    with TextProgress("reading", total, "of shards") as progress:
        for pair in pairs:
            name = f"{pair.split}-{numbers[pair.split]:05d}"
            numbers[pair.split] += 1
            adopted.append(_adopt_one(pair, name, info, folder, arguments, progress.update))
    return adopted


def _adopt_one(
    pair: Pair,
    name: str,
    info: TokenizerInfo,
    folder: Path,
    arguments: argparse.Namespace,
    report,
) -> Adopted:
    shard, documents = pair.shard, arguments.documents
    tokens = scan(shard, info, documents == "eod", report)
    lengths = document_lengths(shard, tokens, info, documents)
    text = TextBytes(folder / TOKENIZER, info)
    text.check(shard, lengths)
    target = folder / f"{name}.bin"
    _place(shard.bin_path, target, arguments.link)
    if arguments.link == "copy" and sha256(target) != tokens.bin_sha256:
        raise UserError(f"{shard.bin_path}: its copy reads back different; check the disk")
    idx_sha256 = write_index(folder / f"{name}.idx", shard.dtype, lengths)
    shard_info = ShardInfo(
        name=name,
        documents=len(lengths),
        tokens=shard.num_tokens,
        bytes=text.count(shard, lengths, tokens.counts),
        bin_sha256=tokens.bin_sha256,
        idx_sha256=idx_sha256,
    )
    return Adopted(pair, shard_info, tokens.counts)


def _place(source: Path, target: Path, link: str) -> None:
    """Puts a `.bin` where the shard belongs."""
    try:
        if link == "hard":
            os.link(source.resolve(), target)
        elif link == "symbolic":
            target.symlink_to(source.resolve())
        else:
            shutil.copyfile(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"--out {target.parent.parent}: the disk is full") from None
        hint = " (another file system); give --link symbolic or --link copy"
        reason = (error.strerror or str(error)) + (hint if link == "hard" else "")
        raise UserError(f"{source}: cannot be put into --out: {reason}") from None


def _manifest(adopted: list[Adopted], info: TokenizerInfo, arguments: argparse.Namespace) -> dict:
    splits, counts, sets = {}, {}, {}
    for split in SPLITS:
        members = [item for item in adopted if item.pair.split == split]
        infos = [item.info for item in members]
        splits[split] = {**_sums(infos), "shards": [shard.to_json() for shard in infos]}
        counts[split] = np.sum([item.counts for item in members], axis=0)
    for name in sorted({item.pair.set for item in adopted}):
        sets[name] = {
            split: _sums(own)
            for split in SPLITS
            if (own := [i.info for i in adopted if (i.pair.set, i.pair.split) == (name, split)])
        }
    source = _describe(adopted)
    shards = [shard for split in SPLITS for shard in splits[split]["shards"]]
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": cat_lm.__version__,
        "fingerprint": fingerprint(shards, info.sha256),
        "source": source,
        "tokenizer": asdict(info),
        "dtype": adopted[0].pair.shard.dtype.name,
        "unigram_loss": unigram_loss(*(counts[split] for split in SPLITS)),
        "empty_documents": 0,
        "sources": sets,
        "splits": splits,
        "arguments": {
            "source": source,
            "tokenizer": arguments.tokenizer,
            "tokenizer_sha256": spec_sha256(arguments.tokenizer),
            "eod_token": arguments.eod_token,
            "documents": arguments.documents,
        },
    }


def _sums(infos: list[ShardInfo]) -> dict[str, int]:
    return {key: sum(getattr(i, key) for i in infos) for key in ("documents", "tokens", "bytes")}


def _describe(adopted: list[Adopted]) -> dict:
    """What the manifest says of the files; the same wherever they lie."""
    listing = "".join(f"{i.pair.set} {i.pair.split} {i.info.bin_sha256}\n" for i in adopted)
    return {
        "kind": "megatron",
        "files": len(adopted),
        "file_bytes": sum(i.pair.shard.bin_path.stat().st_size for i in adopted),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }


def _print_summary(out: Path, manifest: dict) -> None:
    for split, counts in manifest["splits"].items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes']:,} bytes of text, {len(counts['shards'])} shards"
        )
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token")
    print(f"{out}: complete")
