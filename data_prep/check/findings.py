"""The findings about a prepared folder, and their printed form."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cat_lm
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import listed_shards, read_manifest, splits_of
from cat_lm.data.tokenizers import DocumentEncoder
from data_prep.check import excerpts
from data_prep.check.document_lengths import PICTURE, Lengths, draw_lengths
from data_prep.check.duplicates import Duplicates, find_duplicates
from data_prep.check.integrity import manifest_problems, shard_problems
from data_prep.common.unfinished import TOKENIZER
from data_prep.common.workers import tell_workers, useful_workers

BAR_WIDTH = 40


def inspect(options: argparse.Namespace) -> Duplicates | None:
    """Prints what is in `options.folder` (the command's options), and writes it where asked.

    Returns the duplicates, None with `no_duplicates`. Raises `UserError` where data are damaged,
    with the first finding; several are printed before, and all of them are in `options.json`.
    """
    manifest = read_manifest(options.folder)
    _print_manifest(options.folder, manifest)
    shards = len(list(listed_shards(manifest)))
    tell_workers(options.workers, shards)
    workers = useful_workers(options.workers, shards)
    corpora, problems = _check(options, manifest, workers)
    findings = {
        # By this the next inspection knows a file that it may replace.
        "provenance": {
            "command": "python -m data_prep.inspect",
            "versions": {"cat_lm": cat_lm.__version__},
        },
        "folder": str(options.folder),
        "intact": not problems,
        "problem": problems[0] if problems else None,
        "problems": problems,
        "checksums_compared": not options.no_checksums,
        "manifest": manifest,
        "document_lengths": None,
        "duplicates": None,
    }
    duplicates = None
    if not problems:
        lengths = {split: Lengths(corpus) for split, corpus in corpora.items()}
        findings["document_lengths"] = {key: value.to_json() for key, value in lengths.items()}
        for split, histogram in findings["document_lengths"].items():
            _print_histogram(split, histogram)
        if options.out:
            draw_lengths(lengths, options.context_length, options.out / PICTURE)
            print(f"\npicture: {options.out / PICTURE}")
        _print_samples(options, corpora)
        if not options.no_duplicates:
            duplicates = find_duplicates(corpora, workers, options.scratch)
            findings["duplicates"] = duplicates.to_json()
            _print_duplicates(duplicates, corpora)
    if options.json:
        write_json(options.json, findings)
    if problems:
        _complain(problems)
    checked = "sizes and headers" if options.no_checksums else "checksums, counts, EOD and ids"
    print(f"intact: {checked}")
    return duplicates


def _check(
    options: argparse.Namespace, manifest: dict, workers: int
) -> tuple[dict[str, TokenCorpus], list[str]]:
    """The opened splits, and everything that is wrong with them."""
    try:
        # Not by `open_corpus`, which ends at the first contradiction in the manifest.
        corpora = {
            split: TokenCorpus(options.folder, split, manifest) for split in splits_of(manifest)
        }
    except UserError as error:  # a shard is gone, or its size is not what the manifest says
        return {}, [str(error)]
    problems = list(manifest_problems(options.folder, manifest))
    if not problems and not options.no_checksums:
        problems = shard_problems(corpora, workers)
    return corpora, problems


def _complain(problems: list[str]) -> None:
    if len(problems) == 1:
        raise UserError(problems[0])
    for problem in problems:
        print(f"damaged: {problem}")
    raise UserError(f"{problems[0]} (and {len(problems) - 1} more, listed above)")


def _print_manifest(folder: Path, manifest: dict) -> None:
    tokenizer = manifest["tokenizer"]
    print(f"{folder}: {json.dumps(manifest['source'], ensure_ascii=False)}")
    print(
        f"tokenizer: {tokenizer['spec']}, {tokenizer['vocab_size']} ids, "
        f"EOD {tokenizer.get('eod_token')!r} = {tokenizer['eod_id']}, stored as {manifest['dtype']}"
    )
    if "convention" in tokenizer:
        print(f"convention: {tokenizer['convention']}")
    print(f"fingerprint: {manifest['fingerprint']}")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token\n")
    header = ("set", "split", "documents", "tokens", "bytes", "of tokens", "bytes/token")
    splits = manifest["splits"]
    rows = [
        (name, split, counts)
        for name, by_split in manifest["sources"].items()
        for split, counts in by_split.items()
    ]
    rows += [("all", split, counts) for split, counts in splits.items()]
    width = max(len("set"), *(len(name) for name, _, _ in rows))
    print(f"{header[0]:{width}}  {header[1]:10}" + "".join(f"{title:>16}" for title in header[2:]))
    for name, split, counts in rows:
        numbers = "".join(f"{counts[key]:>16,}" for key in header[2:5])
        tokens = counts["tokens"]
        share = f"{tokens / splits[split]['tokens']:.2%}" if tokens else "-"
        ratio = f"{counts['bytes'] / tokens:.2f}" if tokens else "-"
        print(f"{name:{width}}  {split:10}{numbers}{share:>16}{ratio:>16}")


def _print_histogram(split: str, histogram: dict) -> None:
    if not histogram["buckets"]:
        print(f"\n{split}: no documents")
        return
    quantiles = ", ".join(f"{name} {value:,}" for name, value in histogram["quantiles"].items())
    print(f"\n{split}: tokens in a document: mean {histogram['mean']:,.0f}, {quantiles}")
    most = max(histogram["buckets"].values())
    for start, count in histogram["buckets"].items():
        bar = "#" * max(1, round(BAR_WIDTH * count / most))
        print(f"  from {start:>10,} {count:>12,} {bar}")


def _print_samples(options: argparse.Namespace, corpora: dict[str, TokenCorpus]) -> None:
    tokenizer = corpora["train"].manifest["tokenizer"]
    encoder = DocumentEncoder(
        options.folder / TOKENIZER, tokenizer["eod_id"], tokenizer["vocab_size"]
    )
    for corpus in corpora.values():
        excerpts.print_documents(corpus, encoder, options.samples, options.context_length)
    excerpts.print_windows(corpora["train"], encoder, options.samples, options.context_length)
    if options.samples:
        print("-----")


def _print_duplicates(found: Duplicates, corpora: dict[str, TokenCorpus]) -> None:
    print("\nexact duplicates, by their tokens:")
    for kind, what, split in (
        ("train", "train documents that repeat an earlier one", "train"),
        ("validation", "validation documents that repeat an earlier one", "validation"),
        ("across", "validation documents that are in train", "validation"),
    ):
        count, corpus = getattr(found, kind), corpora[split]
        share = f" ({count.tokens / corpus.num_tokens:.3%} of {split})" if count.documents else ""
        print(f"  {what}: {count.documents:,}, {count.tokens:,} tokens{share}")
        original = "train" if kind == "across" else split
        for pair in found.examples[kind]:
            print(
                f"    {split} document {pair['document']:,} is {original} document "
                f"{pair['same_as']:,} ({pair['tokens']:,} tokens)"
            )
