"""Raw text to token shards: python -m data_prep.prepare --source … --tokenizer … --out DIR."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cat_lm.errors import UserError, command

KINDS = ("python-stdlib", "files", "slimpajama")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without reading anything."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.prepare",
        description="Turns text into Megatron .bin/.idx token shards with a held-out validation "
        "split and a manifest. The result is the same for every number of workers. Running it "
        "again on finished data does nothing; a run that was killed starts over.",
    )
    add = parser.add_argument
    add("--source", required=True, choices=KINDS, help="where the text comes from")
    add(
        "--path",
        help="files: a file, folder or glob of txt, md, jsonl(.gz|.zst), parquet; "
        "slimpajama: a local mirror, or hub:OWNER/NAME[@REVISION]",
    )
    add("--validation-path", help="files: held-out text of your own, instead of a fraction")
    add("--text-key", default="text", help="key of the text in jsonl and parquet (default: text)")
    add(
        "--document-separator",
        metavar="TEXT",
        help=r"what separates documents in txt and md files, such as '\n\n' "
        "(default: a file is a document)",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="SPEC",
        help="tokenizer.json or a folder, a sentencepiece *.model, train:sentencepiece:VOCAB, "
        "or bytes",
    )
    add("--eod-token", help="end-of-document token (default: the tokenizer's own)")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the result")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add(
        "--validation-fraction",
        type=float,
        default=0.05,
        help="share of documents held out, unless the source has its own split (default: 0.05)",
    )
    add("--seed", type=int, default=0, help="decides which documents are held out (default: 0)")
    add("--max-documents", type=int, help="stop after this many documents")
    add("--max-bytes", type=int, help="stop after this many bytes of text")
    add("--shard-tokens", type=int, default=500_000_000, help="size of a shard (default: 5e8)")
    add("--scratch", type=Path, metavar="DIR", help="folder for files in the making (default: out)")
    add("--overwrite", action="store_true", help="replace other data in the folder")
    arguments = parser.parse_args(argv)
    _check(arguments)
    return arguments


def _check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.validation_fraction < 1:
        value = arguments.validation_fraction
        raise UserError(f"--validation-fraction {value}: must lie between 0 and 1")
    for name in ("workers", "max_documents", "max_bytes", "shard_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if arguments.document_separator is not None:
        arguments.document_separator = _unescaped(arguments.document_separator)
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out {arguments.out}: is a file, a folder is needed")


def _unescaped(separator: str) -> str:
    """A separator as typed in a shell, with its escapes (a backslash and n) resolved."""
    try:
        text = separator.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise UserError(rf"--document-separator {separator!r}: give some text, such as '\n\n'")
    return text


@command
def main() -> None:
    arguments = parse_arguments()
    # Set before the library starts its threads; the preparation brings its own processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from data_prep.pipeline import prepare

    prepare(arguments)


if __name__ == "__main__":
    main()
