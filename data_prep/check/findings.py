"""Inspect a prepared folder, and print the findings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

import pandas as pd

from cat_lm.core.errors import UserError
from cat_lm.core.outputs import write_result
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import read_manifest, splits_of
from cat_lm.data.tokenizers import DocumentEncoder
from data_prep.check import contents
from data_prep.check.integrity import (
    EXAMPLES,
    find_duplicates,
    manifest_problems,
    shard_problems,
)
from data_prep.encode.plan import TOKENIZER

DUPLICATES = {
    "train": "train documents that repeat an earlier one",
    "validation": "validation documents that repeat an earlier one",
    "across": "validation documents that are in train",
}


def inspect(options: argparse.Namespace) -> bool:
    """Print the contents of `options.folder`, and write the plot and the JSON if asked for.

    Return True if there are duplicates of the type in --fail-on-duplicates.

    Raises:
        UserError: the data are damaged; the message has the first finding. If there are several,
            all of them are printed before, and written to `options.json`.
    """
    manifest = read_manifest(options.folder)
    _print_manifest(options.folder, manifest)
    corpora, problems = _check(options, manifest)
    findings = {
        "folder": str(options.folder),
        "intact": not problems,
        "problem": problems[0] if problems else None,
        "problems": problems,
        "checksums_compared": not options.no_checksums,
        "manifest": manifest,
        "document_lengths": None,
        "duplicates": None,
    }
    fails = False
    if not problems:
        findings["document_lengths"] = _show_contents(options, corpora)
        if not options.no_duplicates:
            tables = find_duplicates(corpora, options.workers, options.scratch)
            findings["duplicates"] = found = _describe_duplicates(tables)
            _print_duplicates(found, corpora)
            on = {"across": ["across"], "any": list(DUPLICATES), None: []}
            fails = any(found[kind]["documents"] for kind in on[options.fail_on_duplicates])
    if options.json:
        write_result(options.json, "--json", "python -m data_prep.inspect", findings)
    if len(problems) > 1:
        print(*(f"damaged: {problem}" for problem in problems), sep="\n")
        raise UserError(f"{problems[0]} (and {len(problems) - 1} more, listed above)")
    if problems:
        raise UserError(problems[0])
    checked = "sizes and headers" if options.no_checksums else "checksums, counts, EOD and ids"
    print(f"intact: {checked}")
    return fails


def _check(options: argparse.Namespace, manifest: dict) -> tuple[dict[str, TokenCorpus], list[str]]:
    try:
        # `open_corpus` would raise at the first contradiction in the manifest.
        corpora = {
            split: TokenCorpus(options.folder, split, manifest) for split in splits_of(manifest)
        }
    except UserError as error:  # A shard is missing, or has another size than in the manifest.
        return {}, [str(error)]
    problems = list(manifest_problems(options.folder, manifest))
    if not problems and not options.no_checksums:
        problems = shard_problems(corpora, options.workers)
    return corpora, problems


def _show_contents(options: argparse.Namespace, corpora: dict[str, TokenCorpus]) -> dict:
    lengths = {split: contents.count_lengths(corpus) for split, corpus in corpora.items()}
    described = {split: contents.describe_lengths(counts) for split, counts in lengths.items()}
    for split, histogram in described.items():
        contents.print_histogram(split, histogram)
    if options.out:
        contents.draw_lengths(lengths, options.context_length, options.out / contents.PICTURE)
        print(f"\npicture: {options.out / contents.PICTURE}")
    tokenizer = corpora["train"].manifest["tokenizer"]
    folder, ids = options.folder / TOKENIZER, (tokenizer["eod_id"], tokenizer["vocab_size"])
    encoder = DocumentEncoder(folder, *ids)
    contents.print_samples(corpora, encoder, options.samples, options.context_length)
    return described


def _print_manifest(folder: Path, manifest: dict) -> None:
    tokenizer = manifest["tokenizer"]
    print(f"{folder}: {json.dumps(manifest['source'], ensure_ascii=False)}")
    print(
        f"tokenizer: {tokenizer['spec']}, {tokenizer['vocab_size']} ids, "
        f"EOD {tokenizer.get('eod_token')!r} = {tokenizer['eod_id']}, stored as {manifest['dtype']}"
    )
    print(f"fingerprint: {manifest['fingerprint']}")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token\n")
    of_sets = {**manifest["sources"], "all": manifest["splits"]}
    rows = [
        (name, split, *(counts[key] for key in ("documents", "tokens", "bytes")))
        for name, by_split in of_sets.items()
        for split, counts in by_split.items()
    ]
    table = pd.DataFrame(rows, columns=["set", "split", "documents", "tokens", "bytes"])
    totals = table["split"].map({k: v["tokens"] for k, v in manifest["splits"].items()})
    table["of tokens"] = (table["tokens"] / totals).map("{:.2%}".format)
    table["bytes/token"] = (table["bytes"] / table["tokens"]).map("{:.2f}".format)
    numbers = dict.fromkeys(("documents", "tokens", "bytes"), "{:,}".format)
    print(table.to_string(index=False, formatters=numbers))


def _describe_duplicates(tables: Iterable[pd.DataFrame]) -> dict:
    described: dict = {"examples": {kind: [] for kind in DUPLICATES}}
    described |= {kind: {"documents": 0, "tokens": 0} for kind in DUPLICATES}
    for table in tables:
        for kind, own in table.groupby("kind"):
            described[kind]["documents"] += len(own)
            described[kind]["tokens"] += int(own["tokens"].sum())
            few = own.nsmallest(EXAMPLES, "document").drop(columns="kind").to_dict("records")
            examples = sorted(described["examples"][kind] + few, key=itemgetter("document"))
            described["examples"][kind] = examples[:EXAMPLES]
    return described


def _print_duplicates(found: dict, corpora: dict[str, TokenCorpus]) -> None:
    print("\nexact duplicates, by their tokens:")
    for kind, what in DUPLICATES.items():
        count, split = found[kind], "train" if kind == "train" else "validation"
        total = max(1, corpora[split].num_tokens)
        share = f" ({count['tokens'] / total:.3%} of {split})" if count["documents"] else ""
        print(f"  {what}: {count['documents']:,}, {count['tokens']:,} tokens{share}")
        original = "train" if kind == "across" else split
        for pair in found["examples"][kind]:
            print(
                f"    {split} document {pair['document']:,} is {original} document "
                f"{pair['same_as']:,} ({pair['tokens']:,} tokens)"
            )
