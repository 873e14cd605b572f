"""The findings about a prepared folder, and their printed form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cat_lm.data.corpus import SPLITS, TokenCorpus, fingerprint, read_manifest
from cat_lm.data.shards import Shard
from cat_lm.data.tokenizers import DocumentEncoder
from cat_lm.errors import UserError
from cat_lm.files import sha256, write_json
from data_prep.output import TOKENIZER
from data_prep.progress import TextProgress

BLOCK_TOKENS = 1 << 22
SAMPLE_CHARACTERS = 400
BAR_WIDTH = 40


def inspect(folder: Path, samples: int, checksums: bool, json_file: Path | None) -> None:
    """Prints what is in `folder` and writes it to `json_file`; `UserError` where it is damaged."""
    manifest = read_manifest(folder)
    corpora = {split: TokenCorpus.open(folder, split) for split in SPLITS}
    _print_manifest(folder, manifest)
    problem = next(problems(folder, corpora, checksums), None)
    histograms = None
    if not problem:
        histograms = {split: length_histogram(corpus) for split, corpus in corpora.items()}
        _print_documents(folder, corpora, histograms, samples)
    if json_file:
        write_json(
            json_file,
            {
                "folder": str(folder),
                "intact": problem is None,
                "problem": problem,
                "checksums_compared": checksums,
                "manifest": manifest,
                "document_lengths": histograms,
            },
        )
    if problem:
        raise UserError(problem)
    print("intact: " + ("checksums, counts, EOD and ids" if checksums else "sizes and headers"))


def _print_documents(
    folder: Path, corpora: dict[str, TokenCorpus], histograms: dict[str, dict], samples: int
) -> None:
    for split, histogram in histograms.items():
        _print_histogram(split, histogram)
    tokenizer = next(iter(corpora.values())).manifest["tokenizer"]
    encoder = DocumentEncoder(folder / TOKENIZER, tokenizer["eod_id"], tokenizer["vocab_size"])
    for corpus in corpora.values():
        _print_samples(corpus, encoder, samples)


def problems(folder: Path, corpora: dict[str, TokenCorpus], checksums: bool) -> Iterator[str]:
    """Everything that is wrong with the data, one line each; nothing where they are intact."""
    manifest = next(iter(corpora.values())).manifest
    tokenizer_file = folder / TOKENIZER / "tokenizer.json"
    digest = manifest["tokenizer"]["sha256"]
    if not tokenizer_file.is_file():
        yield f"{tokenizer_file}: no such file"
    elif sha256(tokenizer_file) != digest:
        yield f"{tokenizer_file}: differs from the tokenizer that made the data"
    listed = [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    if fingerprint(listed, digest) != manifest["fingerprint"]:
        yield f"{folder}: the manifest's fingerprint does not belong to its shards"
    for split in SPLITS:
        counts = manifest["splits"][split]
        for key in ("documents", "tokens", "bytes"):
            if sum(shard[key] for shard in counts["shards"]) != counts[key]:
                yield f"{folder}: the shards of {split} do not add up to its number of {key}"
    if not checksums:
        return
    total = sum(s.num_tokens * s.dtype.itemsize for c in corpora.values() for s in c.shards)
    with TextProgress("checking", total, "of shards") as progress:
        for split, corpus in corpora.items():
            listing = manifest["splits"][split]["shards"]
            for shard, expected in zip(corpus.shards, listing, strict=True):
                yield from _shard_problems(shard, expected, corpus)
                progress.update(shard.num_tokens * shard.dtype.itemsize)


def _shard_problems(shard: Shard, expected: dict, corpus: TokenCorpus) -> Iterator[str]:
    if sha256(shard.bin_path) != expected["bin_sha256"]:
        yield f"{shard.bin_path}: its SHA-256 is not the manifest's; prepare the data again"
    if sha256(shard.idx_path) != expected["idx_sha256"]:
        yield f"{shard.idx_path}: its SHA-256 is not the manifest's; prepare the data again"
    eods = 0
    for start in range(0, shard.num_tokens, BLOCK_TOKENS):
        tokens = shard.read(start, min(start + BLOCK_TOKENS, shard.num_tokens))
        eods += int((tokens == corpus.eod_id).sum())
        if int(tokens.max()) >= corpus.vocab_size or int(tokens.min()) < 0:
            yield f"{shard.bin_path}: ids outside the vocabulary of {corpus.vocab_size}"
            return
    if eods != shard.num_documents:
        yield f"{shard.bin_path}: {eods} EOD tokens for {shard.num_documents} documents"
    ends = np.cumsum(shard.lengths, dtype=np.int64)
    if ends[-1] != shard.num_tokens or (shard.tokens[ends - 1] != corpus.eod_id).any():
        yield f"{shard.idx_path}: the documents' lengths do not end at EOD tokens"


def length_histogram(corpus: TokenCorpus) -> dict:
    """Documents by length in tokens (EOD included): counts in [2^k, 2^(k+1)), and quantiles."""
    lengths = np.concatenate([np.asarray(shard.lengths) for shard in corpus.shards])
    if lengths.min() < 1 or lengths.sum(dtype=np.int64) != corpus.num_tokens:
        raise UserError(f"{corpus.folder}: the lengths of the {corpus.split} documents are damaged")
    exponents = np.log2(lengths).astype(int)
    counts = np.bincount(exponents)
    quantiles = np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1], method="nearest")
    return {
        "quantiles": dict(
            zip(("min", "25%", "50%", "75%", "max"), quantiles.tolist(), strict=True)
        ),
        "mean": float(lengths.mean()),
        "buckets": {2**k: int(n) for k, n in enumerate(counts.tolist()) if n},
    }


def _print_manifest(folder: Path, manifest: dict) -> None:
    tokenizer = manifest["tokenizer"]
    print(f"{folder}: {json.dumps(manifest['source'], ensure_ascii=False)}")
    print(
        f"tokenizer: {tokenizer['spec']}, {tokenizer['vocab_size']} ids, "
        f"EOD {tokenizer['eod_token']!r} = {tokenizer['eod_id']}, stored as {manifest['dtype']}"
    )
    print(f"fingerprint: {manifest['fingerprint']}")
    print(f"unigram loss: {manifest['unigram_loss']:.4f} nats a token\n")
    header = ("set", "split", "documents", "tokens", "bytes", "bytes/token")
    rows = [
        (name, split, counts)
        for name, by_split in manifest["sources"].items()
        for split, counts in by_split.items()
    ]
    rows += [("all", split, counts) for split, counts in manifest["splits"].items()]
    width = max(len("set"), *(len(name) for name, _, _ in rows))
    print(f"{header[0]:{width}}  {header[1]:10}" + "".join(f"{title:>16}" for title in header[2:]))
    for name, split, counts in rows:
        numbers = "".join(f"{counts[key]:>16,}" for key in header[2:5])
        print(f"{name:{width}}  {split:10}{numbers}{counts['bytes'] / counts['tokens']:>16.2f}")


def _print_histogram(split: str, histogram: dict) -> None:
    quantiles = ", ".join(f"{name} {value:,}" for name, value in histogram["quantiles"].items())
    print(f"\n{split}: tokens in a document: mean {histogram['mean']:,.0f}, {quantiles}")
    most = max(histogram["buckets"].values())
    for start, count in histogram["buckets"].items():
        bar = "#" * max(1, round(BAR_WIDTH * count / most))
        print(f"  from {start:>10,} {count:>12,} {bar}")


def _print_samples(corpus: TokenCorpus, encoder: DocumentEncoder, samples: int) -> None:
    """Documents at even distances, the middle of long ones left out."""
    count = min(samples, corpus.num_documents)
    for index in (i * corpus.num_documents // count for i in range(count)):
        start, stop = corpus.document(index)
        ids = corpus.tokens(start, min(stop, start + 4 * SAMPLE_CHARACTERS))
        text = encoder.decode(ids if stop - start > len(ids) else ids[:-1])
        shown = text[:SAMPLE_CHARACTERS] + (" …" if len(text) > SAMPLE_CHARACTERS else "")
        end = f"[EOD {int(corpus.tokens(stop - 1, stop)[0])}]"
        print(f"\n----- {corpus.split} document {index}: tokens {start:,} to {stop:,}")
        print(f"{_printable(shown)}{end}")
    if count:
        print("-----")


def _printable(text: str) -> str:
    """Text without the control characters that would act on the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
