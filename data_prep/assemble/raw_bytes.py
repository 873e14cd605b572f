"""Cut a file's bytes into train, validation and test, such as the splits of text8 and enwik8.

The ids are those of `--tokenizer bytes`. A split is one document, and begins where the previous one
ends, even within a character, as is usual in comparisons of byte-level models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import sha256, write_json
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.data.manifest import ALL_SPLITS, MANIFEST, read_manifest
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import MAX_DOCUMENT_TOKENS, ShardWriter, token_dtype
from cat_lm.data.tokenizers import build_tokenizer
from cat_lm.data.verified import note_files, shard_digests
from data_prep.assemble.manifest import build_manifest, print_counts, sum_counts
from data_prep.encode.plan import TOKENIZER


def prepare(arguments: argparse.Namespace) -> None:
    """Write the splits of `arguments.path` and print a summary.

    Raises:
        UserError: the file is missing or too short, or the output folder has other files.
    """
    out, file = arguments.out, Path(arguments.path)
    check_output(out)
    source = _describe_source(file, arguments.splits)
    if out.is_dir() and any(out.iterdir()):
        is_prepared = (out / MANIFEST).is_file()
        if not is_prepared or read_manifest(out).get("source") != source:
            what = "holds data made otherwise" if is_prepared else "is not empty"
            raise UserError(f"--out {out}: {what}; choose another folder")
        for split in source["splits"]:
            open_corpus(out, split)  # Raises if a shard is missing or cut short.
        print(f"{out}: already complete with these arguments, nothing to do")
        return
    with atomic_folder(out, flag="--out") as made:
        manifest = _write_data(made, file, source)
    print_counts(manifest)
    if (end := sum(source["splits"].values())) < source["file_bytes"]:
        print(f"left out: the last {source['file_bytes'] - end:,} bytes of {file}")
    print(f"{out}: complete")


def _describe_source(file: Path, sizes: list[int]) -> dict:
    if not file.is_file():
        what = "is no file" if file.exists() else "no such file"
        raise UserError(f"--path {file}: {what}; raw-bytes reads one file, such as text8")
    try:
        there, digest = file.stat().st_size, sha256(file)
    except OSError as error:
        text = f"--path {file}: cannot be read ({describe_os_error(error)})"
        raise file_error(text, error) from None
    given = ",".join(map(str, sizes))
    if sum(sizes) > there:
        raise UserError(f"--splits {given}: are {sum(sizes):,} bytes, and {file} has {there:,}")
    if max(sizes) >= MAX_DOCUMENT_TOKENS:
        raise UserError(f"--splits {given}: one has at most {MAX_DOCUMENT_TOKENS - 1:,} bytes")
    splits = dict(zip(ALL_SPLITS, sizes, strict=False))
    known = {"kind": "raw-bytes", "files": 1, "file_bytes": there}
    return {**known, "contents_sha256": digest, "splits": splits}


def _write_data(made: Path, file: Path, source: dict) -> dict:
    info = build_tokenizer("bytes", made / TOKENIZER, lambda: ())
    dtype = token_dtype(info.vocab_size)
    shards, counts, start = {}, {}, 0
    for split, size in source["splits"].items():
        data = np.fromfile(file, np.uint8, size, offset=start)
        if len(data) < size:
            raise UserError(f"--path {file}: was cut while it was read")
        tokens = np.full(size + 1, info.eod_id, dtype)
        tokens[:size] = data
        counts[split] = np.bincount(tokens, minlength=info.vocab_size)
        with ShardWriter(made, f"{split}-00000", dtype) as writer:
            writer.write(tokens, np.array([len(tokens)]), [size])
        shards[split] = [writer.info]
        note_files(made, shard_digests(writer.info.to_json()))
        start += size
    sources = {file.name: {split: sum_counts(own) for split, own in shards.items()}}
    arguments = {"source": source, "tokenizer": "bytes"}
    contents = {"empty_documents": 0, "sources": sources}
    manifest = build_manifest(arguments, info, dtype, shards, counts, contents)
    write_json(made / MANIFEST, manifest)
    for split in shards:
        open_corpus(made, split)
    return manifest
