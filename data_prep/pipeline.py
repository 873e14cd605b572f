"""The steps of a preparation: source, tokenizer, encoding, shards, manifest."""

from __future__ import annotations

import argparse
import errno
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import cat_lm
from cat_lm.data.corpus import FORMAT_VERSION, SPLITS, fingerprint
from cat_lm.data.shards import ShardWriter, token_dtype
from cat_lm.data.tokenizers import (
    DocumentEncoder,
    TokenizerInfo,
    build_tokenizer,
    check_spec,
    spec_sha256,
    verify_tokenizer,
)
from cat_lm.errors import UserError
from data_prep import output
from data_prep.documents import Document, Reading
from data_prep.encode import Encoded, EncodedChunk, Plan, encode_documents, place_of, split_of
from data_prep.progress import TextProgress
from data_prep.sources import Source, open_source, sample_texts

TRAINING_SAMPLE = 8_000_000  # bytes of text that train:sentencepiece learns from
CHECK_SAMPLE = 1_000_000  # bytes of text that a tokenizer is verified and measured on
DISK_MARGIN = 1.1
# Sources up to this size are looked through first, so that no split comes out empty by chance.
FEW_DOCUMENTS, FEW_CHARACTERS = 500, 100_000_000


@dataclass
class Totals:
    """What has been written so far: counts per split and set, token counts for the unigram."""

    vocab_size: int
    sets: dict[str, dict[str, Counter]] = field(default_factory=dict)
    token_counts: dict[str, np.ndarray] = field(default_factory=dict)
    empty: int = 0

    def add(self, split: str, encoded: Encoded) -> None:
        counts = self.token_counts.setdefault(split, np.zeros(self.vocab_size, dtype=np.int64))
        counts += np.bincount(encoded.tokens, minlength=self.vocab_size)
        for name, numbers in encoded.sets.items():
            self.sets.setdefault(name, {}).setdefault(split, Counter()).update(numbers)

    def unigram_loss(self) -> float:
        """Nats per validation token under the training split's add-one-smoothed unigram model."""
        train, validation = (self.token_counts[split] for split in SPLITS)
        log_probability = np.log(train + 1.0) - np.log(train.sum() + self.vocab_size)
        return float(-(validation * log_probability).sum() / validation.sum())


def prepare(arguments: argparse.Namespace) -> None:
    """Runs the preparation that the command line asks for and prints its summary."""
    check_spec(arguments.tokenizer)
    reading = Reading(arguments.text_key, arguments.document_separator)
    source = open_source(arguments.source, arguments.path, reading, arguments.validation_path)
    identity = _identity(arguments, source)
    if _is_complete(arguments, identity):  # finished data may lie where nothing can be written
        return
    with output.locked(arguments.out):
        if _is_complete(arguments, identity):
            return
        try:
            _prepare(arguments, source, identity)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else error.strerror or str(error)
            raise UserError(f"--out {arguments.out}: {reason}") from error
        finally:
            output.abandon(arguments.out)


def _is_complete(arguments: argparse.Namespace, identity: dict) -> bool:
    folder = arguments.out
    complete = folder.is_dir() and output.is_complete(folder, identity, arguments.overwrite)
    if complete:
        print(f"{folder}: already complete with these arguments, nothing to do")
    return complete


def _prepare(arguments: argparse.Namespace, source: Source, identity: dict) -> None:
    start = time.monotonic()
    output.begin(arguments.out, identity)
    folder = arguments.out / output.TOKENIZER
    fraction = _fraction_held_out(arguments, source)
    sampling = _sampling(arguments.seed, fraction, source)
    info = build_tokenizer(
        arguments.tokenizer, folder, lambda: sampling(TRAINING_SAMPLE), arguments.eod_token
    )
    check_texts = list(sampling(CHECK_SAMPLE))
    verify_tokenizer(info, folder, check_texts)
    dtype = token_dtype(info.vocab_size)
    total = _expected_text(arguments, source)
    _check_disk(arguments, total, _tokens_per_byte(info, folder, check_texts), dtype)
    tokenized = time.monotonic()
    print(f"tokenizer: {info.kind}, {info.vocab_size} ids ({tokenized - start:.1f} s)", flush=True)

    plan = Plan(folder, info, dtype, arguments.seed, fraction)
    totals = Totals(info.vocab_size)
    results = encode_documents(_limited(source, arguments), plan, arguments.workers)
    shards = _write(arguments, results, dtype, totals, total)
    _check_counts(totals, source, arguments)
    manifest = _manifest(identity, info, dtype, shards, totals)
    output.finish(arguments.out, manifest)
    _print_summary(arguments.out, manifest, time.monotonic() - tokenized)


def _identity(arguments: argparse.Namespace, source: Source) -> dict:
    """Everything that decides the result; workers and scratch do not."""
    names = (
        "tokenizer",
        "eod_token",
        "text_key",
        "document_separator",
        "validation_path",
        "validation_fraction",
        "seed",
        "max_documents",
        "max_bytes",
        "shard_tokens",
    )
    values = {name: getattr(arguments, name) for name in names}
    return {
        "source": source.describe(),
        "tokenizer_sha256": spec_sha256(arguments.tokenizer),
        **values,
    }


def _fraction_held_out(arguments: argparse.Namespace, source: Source) -> float:
    """--validation-fraction; among few documents, one that holds out at least one and not all.

    With a handful of documents the hash often leaves a split empty. Then the fraction moves to
    between the two documents whose hashes are nearest to it.
    """
    fraction, size = arguments.validation_fraction, 0
    places: set[float] = set()
    for document in _limited(source, arguments):
        size += len(document.text)
        if document.split or len(places) >= FEW_DOCUMENTS or size > FEW_CHARACTERS:
            return fraction
        if document.text:
            places.add(place_of(document, arguments.seed))
    ordered = sorted(places)
    if len(ordered) < 2 or ordered[0] < fraction <= ordered[-1]:
        return fraction
    neighbours = ordered[:2] if fraction <= ordered[0] else ordered[-2:]
    return sum(neighbours) / 2


def _sampling(seed: int, fraction: float, source: Source) -> Callable[[int], Iterator[str]]:
    """A function from a number of bytes to a sample of training texts of that size."""

    def is_training(document: Document) -> bool:
        return split_of(document, seed, fraction) == "train"

    return lambda max_bytes: sample_texts(source, seed, max_bytes, is_training)


def _expected_text(arguments: argparse.Namespace, source: Source) -> int | None:
    known = [n for n in (source.text_bytes(), arguments.max_bytes) if n is not None]
    return min(known, default=None)


def _tokens_per_byte(info: TokenizerInfo, folder: Path, texts: list[str]) -> float:
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    tokens = sum(len(ids) + 1 for ids in encoder.encode_batch(texts))
    return tokens / max(1, sum(len(text.encode()) for text in texts))


def _check_disk(
    arguments: argparse.Namespace, total: int | None, tokens_per_byte: float, dtype: np.dtype
) -> None:
    """Refuses to start what would not fit, as far as the input's size is known."""
    if total is None:
        return
    needed = int(total * tokens_per_byte * dtype.itemsize * DISK_MARGIN)
    in_scratch = min(needed, 2 * arguments.shard_tokens * dtype.itemsize)  # a shard of each split
    places = [("--out", arguments.out, needed), ("--scratch", arguments.scratch, in_scratch)]
    for flag, folder, size in places:
        if folder is None or not folder.exists():
            continue
        free = shutil.disk_usage(folder).free
        if size > free:
            raise UserError(
                f"{flag} {folder}: about {size / 1e9:.3f} GB are needed and {free / 1e9:.3f} GB "
                "are free; choose another folder or limit the text with --max-bytes"
            )


def _limited(source: Source, arguments: argparse.Namespace) -> Iterator[Document]:
    """The first documents, up to --max-documents and --max-bytes.

    A validation split of the source's own is limited to the validation fraction of the same.
    Nothing is read of a split beyond its limit, and no part that lies behind it is opened.
    """
    seen: dict[str | None, Counter] = {}
    for part in source.parts:
        share = arguments.validation_fraction if part.split == "validation" else 1.0
        counts = seen.setdefault(part.split, Counter())
        if _limit_reached(counts, share, arguments):
            continue
        for document in source.read(part):
            counts.update(documents=1, bytes=len(document.text.encode()))
            yield document
            if _limit_reached(counts, share, arguments):
                break


def _limit_reached(counts: Counter, share: float, arguments: argparse.Namespace) -> bool:
    limits = {"documents": arguments.max_documents, "bytes": arguments.max_bytes}
    return any(limit and counts[key] >= limit * share for key, limit in limits.items())


def _write(
    arguments: argparse.Namespace,
    results: Iterable[EncodedChunk],
    dtype: np.dtype,
    totals: Totals,
    total_bytes: int | None,
) -> dict[str, list[dict]]:
    """Writes the shards of both splits; returns the manifest's list of each."""
    with (
        output.scratch_folder(arguments.out, arguments.scratch) as scratch,
        ShardWriter(arguments.out, "train", dtype, arguments.shard_tokens, scratch) as train,
        ShardWriter(arguments.out, "validation", dtype, arguments.shard_tokens, scratch) as held,
        TextProgress("encoding", total_bytes) as progress,
    ):
        writers = {"train": train, "validation": held}
        for chunk in results:
            totals.empty += chunk.empty
            for split, encoded in chunk.splits.items():
                writers[split].write(encoded.tokens, encoded.lengths, encoded.text_bytes)
                totals.add(split, encoded)
            progress.update(chunk.text_bytes)
    return {split: [s.to_json() for s in writer.shards] for split, writer in writers.items()}


def _check_counts(totals: Totals, source: Source, arguments: argparse.Namespace) -> None:
    where = f"--source {source.kind}" + (f" --path {arguments.path}" if arguments.path else "")
    if not totals.token_counts:
        raise UserError(f"{where}: empty input, no document with any text")
    for split in SPLITS:
        if split not in totals.token_counts:
            raise UserError(
                f"{where}: the {split} split comes out empty; change --validation-fraction "
                f"(now {arguments.validation_fraction}) or --seed, cut texts into documents with "
                "--document-separator, or give --validation-path"
            )


def _manifest(
    identity: dict,
    info: TokenizerInfo,
    dtype: np.dtype,
    shards: dict[str, list[dict]],
    totals: Totals,
) -> dict:
    splits = {}
    for split in SPLITS:
        sums = {key: sum(s[key] for s in shards[split]) for key in ("documents", "tokens", "bytes")}
        eods = int(totals.token_counts[split][info.eod_id])
        if eods != sums["documents"]:
            raise RuntimeError(f"{split}: {eods} EOD tokens for {sums['documents']} documents")
        splits[split] = {**sums, "shards": shards[split]}
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": cat_lm.__version__,
        "fingerprint": fingerprint([s for split in SPLITS for s in shards[split]], info.sha256),
        "source": identity["source"],
        "tokenizer": asdict(info),
        "dtype": dtype.name,
        "unigram_loss": totals.unigram_loss(),
        "empty_documents": totals.empty,
        "sources": {name: dict(by_split) for name, by_split in sorted(totals.sets.items())},
        "splits": splits,
        "arguments": identity,
    }


def _print_summary(folder: Path, manifest: dict, seconds: float) -> None:
    text_bytes = 0
    for split, counts in manifest["splits"].items():
        text_bytes += counts["bytes"]
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes']:,} bytes, {counts['bytes'] / counts['tokens']:.2f} bytes a token, "
            f"{len(counts['shards'])} shards"
        )
    for name, by_split in manifest["sources"].items():
        parts = ", ".join(f"{split} {c['tokens']:,} tokens" for split, c in by_split.items())
        print(f"  {name}: {parts}")
    if manifest["empty_documents"]:
        print(f"left out: {manifest['empty_documents']:,} documents without text")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token")
    print(f"{folder}: complete ({text_bytes / 1e6 / max(seconds, 1e-9):.1f} MB of text a second)")
