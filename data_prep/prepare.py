"""Raw text to token shards: python -m data_prep.prepare --source … --tokenizer … --out DIR."""

from __future__ import annotations

import argparse
import os
import re
import signal

from cat_lm.core.cli import Once, Parser, number, output_path, path_name, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.numbers import DOCUMENTS, FRACTION, REPEATS, SEED, TEXT_BYTES, WORKERS
from data_prep.common import amounts

RAW = "raw-bytes"
KINDS = ("python-stdlib", "files", "slimpajama", RAW)
# What raw-bytes reads; it chooses nothing and has one document a split.
RAW_OPTIONS = {"source", "path", "splits", "tokenizer", "out"}
STAGES = ("all", "encode", "assemble")
WITH_PATHS = ("python-stdlib", "files")  # whose files --exclude can name
LIMITS = ("max_documents", "max_bytes")
# The first so many documents are no uniform subset: a budget among them would mean nothing.
EXCLUSIVE = (
    *((choice, limit) for choice in ("tokens", "mixture", "repeat") for limit in LIMITS),
    ("repeat", "mixture"),
    ("repeat", "tokens"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without reading anything."""
    parser = Parser(
        prog="python -m data_prep.prepare",
        usage="%(prog)s --source KIND [--path PATH] --tokenizer SPEC --out DIR [options]",
        description="Turns text into Megatron .bin/.idx token shards with a held-out validation "
        "split and a manifest. The result is the same for every number of workers and machines. "
        "Running it again on finished data does nothing; a run that was killed or stopped is "
        "continued by the same command.",
    )
    _add_source(parser.add_argument_group("text"))
    _add_tokens(parser.add_argument_group("tokens"))
    _add_choice(parser.add_argument_group("choice of documents"))
    _add_running(parser.add_argument_group("running"))
    arguments = parser.parse_args(argv)
    _check_splits(arguments, parser)
    _convert(arguments)
    _check(arguments)
    return arguments


def _add_source(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--source", required=True, choices=KINDS, help="where the text comes from")
    add(
        "--path",
        action=Once,
        type=path_name,
        help="files: a file, folder or glob of txt, md, jsonl and ndjson, each also packed "
        "(.gz, .zst, .bz2, .xz), json.gz and the like of JSON lines, parquet; "
        "slimpajama: hub:OWNER/NAME[/FOLDER][@REVISION], such as hub:DKYoon/SlimPajama-6B or "
        "hub:gmongaras/SlimPajama-627B_Reupload, or a folder with a copy of it; "
        "raw-bytes: a file, such as enwik8",
    )
    add(
        "--splits",
        metavar="N,N,N",
        help="raw-bytes: the bytes of train, validation and test, in this order, as 90M,5M,5M; "
        "the last may be left out",
    )
    add(
        "--validation-path",
        action=Once,
        type=path_name,
        metavar="PATH",
        help="files: held-out text of your own, instead of a fraction",
    )
    add(
        "--text-key",
        default="text",
        metavar="KEY",
        help="key of the text in jsonl and parquet (default: text)",
    )
    add(
        "--set-key",
        default="meta.redpajama_set_name",
        metavar="KEY",
        help="key of a document's named set, dots lead into objects "
        "(default: meta.redpajama_set_name)",
    )
    add(
        "--document-separator",
        metavar="TEXT",
        help=r"what separates documents in txt and md files, such as '\n\n' "
        "(default: a file is a document)",
    )
    add(
        "--max-malformed",
        default="0.01%",
        metavar="N|SHARE",
        help="bear so many records that are no documents; they are listed in DIR/malformed.log "
        "(default: 0.01%%)",
    )


def _add_tokens(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tokenizer",
        required=True,
        metavar="SPEC",
        help="tokenizer.json or a folder, a sentencepiece *.model, train:sentencepiece:VOCAB, "
        "or bytes",
    )
    add("--eod-token", metavar="TOKEN", help="end-of-document token (default: the tokenizer's own)")
    add("--shard-tokens", default="500M", metavar="N", help="size of a shard (default: 500M)")


def _add_choice(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--validation-fraction",
        type=number(FRACTION, above=0),
        default=0.05,
        metavar="SHARE",
        help="share of documents held out, unless the source has its own split; of a single "
        "document, the share at its end (default: 0.05)",
    )
    add(
        "--seed",
        type=whole(SEED),
        default=0,
        metavar="N",
        help="decides which documents are held out, and which ones a part of a set consists of "
        "(default: 0)",
    )
    add(
        "--exclude",
        action=Once,
        metavar="GLOB,GLOB",
        help="files, python-stdlib: no files whose path below --path, --validation-path or the "
        "library's folder matches, such as 'encodings/*'; * stands for / too",
    )
    add("--sets", action=Once, metavar="NAME,NAME", help="only documents of these sets")
    add("--exclude-sets", action=Once, metavar="NAME,NAME", help="no documents of these sets")
    add(
        "--tokens",
        metavar="N",
        help="training tokens of the result, such as 15B: a uniform subset of the documents that "
        "the seed decides, the same on every machine",
    )
    add(
        "--mixture",
        action=Once,
        metavar="SET=WEIGHT,…",
        help="shares of the training tokens; other sets are left out. With --tokens, sets with too "
        "little text are repeated; without it, the result is as large as it gets unrepeated",
    )
    add(
        "--max-repeats",
        type=whole(REPEATS),
        default=4,
        metavar="N",
        help="how often --mixture may use a set (default: 4)",
    )
    add(
        "--repeat",
        action=Once,
        metavar="SET=TIMES,…",
        help="use sets more than once, such as 2 or 1.5 times",
    )
    add(
        "--max-documents",
        type=whole(DOCUMENTS),
        metavar="N",
        help="stop after this many documents",
    )
    add(
        "--max-bytes",
        type=whole(TEXT_BYTES),
        metavar="N",
        help="stop after this many bytes of text",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--out", required=True, type=output_path, metavar="DIR", help="folder for the result")
    add(
        "--scratch",
        type=output_path,
        metavar="DIR",
        help="folder for the parts (default: in --out); several machines need one that they share",
    )
    cores = len(os.sched_getaffinity(0))
    add(
        "--workers",
        type=whole(WORKERS),
        default=cores,
        metavar="N",
        help="processes (default: all cores)",
    )
    add(
        "--stage",
        choices=STAGES,
        default="all",
        help="encode: files to parts; assemble: parts to shards, and whatever is still missing; "
        "all: both (default)",
    )
    add("--task", metavar="I/N", help="with --stage encode: the units of task I (from 0) of N")
    add("--estimate", action="store_true", help="only tell what disk and time it would take")
    add(
        "--overwrite",
        action="store_true",
        help="replace other data in the folder: what its manifest lists goes, all else stays",
    )


def _check_splits(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Read --splits; refuse what says nothing with or without raw-bytes."""
    if arguments.source != RAW:
        if arguments.splits is not None:
            raise UserError(f"--splits {amounts.cut(arguments.splits)}: only with --source {RAW}")
        return
    for name, value in vars(arguments).items():
        if name not in RAW_OPTIONS and value != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: says nothing with --source {RAW}; leave it out")
    for name, what in (("path", "a file"), ("splits", "bytes of each split, such as 90M,5M,5M")):
        if getattr(arguments, name) is None:
            raise UserError(f"--source {RAW} needs --{name}: {what}")
    if arguments.tokenizer != "bytes":
        raise UserError(
            f"--tokenizer {amounts.cut(arguments.tokenizer)}: --source {RAW} has bytes for ids; "
            "give bytes"
        )
    arguments.splits = amounts.split_sizes("--splits", arguments.splits)


def _convert(arguments: argparse.Namespace) -> None:
    """Values that argparse leaves as they were typed."""
    for name, convert in (
        ("shard_tokens", amounts.amount),
        ("tokens", amounts.amount),
        ("exclude", amounts.patterns),
        ("sets", amounts.names),
        ("exclude_sets", amounts.names),
        ("mixture", amounts.numbers_by_set),
        ("repeat", amounts.numbers_by_set),
        ("max_malformed", amounts.Limit.parse),
        ("task", _task),
    ):
        value = getattr(arguments, name)
        if value is not None:
            setattr(arguments, name, convert(f"--{name.replace('_', '-')}", value))
    if arguments.document_separator is not None:
        arguments.document_separator = _unescaped(arguments.document_separator)


def _task(flag: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"{flag} {amounts.cut(text)}: give I/N, with I from 0 to N - 1")
    return int(match[1]), int(match[2])


def _check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.validation_fraction < 1:
        value = arguments.validation_fraction
        raise UserError(f"--validation-fraction {value}: must lie between 0 and 1")
    if not all((key := arguments.set_key).split(".")):
        raise UserError(f"--set-key {key!r}: give a key, or several with dots between")
    for name, times in (arguments.repeat or {}).items():
        if float(times) > REPEATS.high:
            raise UserError(f"--repeat {name}={times}: must be at most {REPEATS.high:,} times")
    if arguments.exclude is not None and arguments.source not in WITH_PATHS:
        flag = f"--exclude {amounts.cut(','.join(arguments.exclude))}"
        raise UserError(f"{flag}: only with --source {' or '.join(WITH_PATHS)}")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out {arguments.out}: is a file, a folder is needed")
    if arguments.task is not None and arguments.stage != "encode":
        raise UserError("--task goes with --stage encode")
    for first, second in EXCLUSIVE:
        if getattr(arguments, first) is not None and getattr(arguments, second) is not None:
            flags = [f"--{name.replace('_', '-')}" for name in (first, second)]
            raise UserError(f"{flags[0]} does not go with {flags[1]}; choose one")
    for name in sorted({*(arguments.mixture or ()), *(arguments.repeat or ())}):
        left_out = name in (arguments.exclude_sets or ())
        if left_out or (arguments.sets is not None and name not in arguments.sets):
            raise UserError(f"--mixture or --repeat {name}: the set is left out by the other flags")


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends cleanly, as Ctrl-C does
    # Set before the library starts its threads; the preparation brings its own processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.source == RAW:
        from data_prep.assemble import raw_bytes

        raw_bytes.prepare(arguments)
        return
    from data_prep.assemble.pipeline import prepare

    prepare(arguments)


if __name__ == "__main__":
    main()
