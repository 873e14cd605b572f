"""Convert text to token shards: python -m data_prep.prepare --source … --tokenizer … --out DIR."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from cat_lm.core.cli import Once, Parser, announce, number, output_path, path_name, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.numbers import DOCUMENTS, FRACTION, REPEATS, SEED, TEXT_BYTES, TOKENS, WORKERS
from cat_lm.core.readers import clipped
from cat_lm.core.registry import one_of
from data_prep.common import amounts
from data_prep.sources.presets import HUB_PREFIX, PRESETS, SET_KEY, TEXT_KEY

RAW = "raw-bytes"
REPOSITORIES = ("hub", "slimpajama")
KINDS = ("python-stdlib", "files", *REPOSITORIES, RAW)
# The options of raw-bytes, which selects no documents: a split is one document.
RAW_OPTIONS = {"source", "path", "splits", "tokenizer", "out"}
LIMITS = ("max_documents", "max_bytes")
# --max-documents and --max-bytes take the first documents, which are no uniform subset.
EXCLUSIVE = (
    *((choice, limit) for choice in ("tokens", "mixture", "repeat") for limit in LIMITS),
    ("repeat", "mixture"),
    ("repeat", "tokens"),
)

HELP = {
    "--source": f"where the text comes from: {', '.join(KINDS)}, hub:OWNER/NAME[/FOLDER]"
    f"[@REVISION] for a data set of the Hub, or a known one: {', '.join(PRESETS)}",
    "--path": "files: a file, folder or glob of txt, md, jsonl and ndjson, each also packed (.gz, "
    ".zst, .zstd, .bz2, .xz), json.gz and the like of JSON lines, parquet; hub, slimpajama and "
    "known data sets: hub:OWNER/NAME[/FOLDER][@REVISION], or a folder with a copy of it; "
    "raw-bytes: a file, such as enwik8",
    "--splits": "raw-bytes: number of bytes of train, validation and test, such as 90M,5M,5M; test "
    "may be left out",
    "--validation-path": "files: path of the validation text, instead of --validation-fraction",
    "--text-key": f"key of the text in jsonl and parquet (default: {TEXT_KEY})",
    "--set-key": "key of the name of a document's set, with dots into nested objects (default: "
    f"that of a known data set, or {SET_KEY})",
    "--document-separator": r"what separates documents in txt and md files, such as '\n\n' "
    "(default: a file is a document)",
    "--max-malformed": "number or share of records without a valid document that are tolerated "
    "and listed in DIR/malformed.log (default: 0.01%%)",
    "--tokenizer": "tokenizer.json or a folder, a sentencepiece *.model, OWNER/NAME[@REVISION] on "
    "the Hub, train:sentencepiece:VOCAB, or bytes",
    "--eod-token": "end-of-document token (default: the tokenizer's own)",
    "--shard-tokens": "tokens per shard (default: 500M)",
    "--validation-fraction": "fraction of documents for validation, unless the source has its own "
    "split; of a single document, the fraction at its end (default: 0.05)",
    "--seed": "seed that selects the validation documents, and the documents of a subset of a set "
    "(default: 0)",
    "--exclude": "leave out files whose path below --path, --validation-path or the standard "
    "library's folder matches, such as 'encodings/*'; * also matches /",
    "--files-share": "hub, slimpajama: fraction of the training files to read, selected by a hash "
    "of the seed and their names, such as 0.02 of terabytes",
    "--sets": "names of the sets to include (default: all)",
    "--exclude-sets": "names of sets to leave out",
    "--tokens": "number of training tokens of the result, such as 15B; the seed selects a uniform "
    "subset of the documents, the same on every machine",
    "--mixture": "weights of sets by training tokens; other sets are left out. With --tokens, sets "
    "with too little text are repeated; without it, the result is as large as possible without "
    "repetition",
    "--max-repeats": "how often --mixture may use a set (default: 4)",
    "--repeat": "how often to use sets, such as 2 or 1.5 times",
    "--max-documents": "stop after this many documents",
    "--max-bytes": "stop after this many bytes of text",
    "--out": "folder for the result",
    "--scratch": "folder for intermediate files (default: in --out); several machines need a "
    "shared one",
    "--workers": "number of processes (default: all cores)",
    "--stage": "encode: input files to parts; assemble: parts to shards, after encoding what is "
    "missing; all: both (default)",
    "--task": "with --stage encode: do the work of task I (from 0) of N, such as 3/8",
    "--estimate": "only print estimates of disk space and time",
    "--overwrite": "replace prepared data in --out when the new ones are complete; only files that "
    "its manifest lists are deleted",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and check what can be checked without reading files."""
    parser = Parser(
        prog="python -m data_prep.prepare",
        usage="%(prog)s --source SOURCE [--path PATH] --tokenizer SPEC --out DIR [options]",
        description="Turns text into Megatron .bin/.idx token shards with a held-out validation "
        "split and a manifest. The result is the same for every number of workers and machines. "
        "Running it again on finished data does nothing; a run that was killed or stopped is "
        "continued by the same command.",
    )
    _add_source(parser.add_argument_group("text"))
    _add_tokens(parser.add_argument_group("tokens"))
    _add_selection(parser.add_argument_group("choice of documents"))
    _add_running(parser.add_argument_group("running"))
    arguments = parser.parse_args(argv)
    _check_raw(arguments, parser)
    _resolve_source(arguments)
    _check(arguments)
    return arguments


def _add(group: Any, flag: str, type: Any = None, metavar: str | None = None, **more: Any) -> None:
    group.add_argument(flag, type=type, metavar=metavar, help=HELP[flag], **more)


def _add_source(group: Any) -> None:
    _add(group, "--source", metavar="SOURCE", required=True)
    _add(group, "--path", path_name, action=Once)
    _add(group, "--splits", amounts.parse_split_sizes, "N,N,N")
    _add(group, "--validation-path", path_name, "PATH", action=Once)
    flags = ("--text-key", "--text-column")
    group.add_argument(*flags, metavar="KEY", help=HELP["--text-key"])
    _add(group, "--set-key", amounts.parse_key_path, "KEY")
    _add(group, "--document-separator", amounts.parse_separator, "TEXT")
    _add(group, "--max-malformed", amounts.parse_limit, "N|SHARE", default="0.01%")


def _add_tokens(group: Any) -> None:
    _add(group, "--tokenizer", metavar="SPEC", required=True)
    _add(group, "--eod-token", metavar="TOKEN")
    _add(group, "--shard-tokens", whole(TOKENS.at_least(1)), "N", default=500_000_000)


def _add_selection(group: Any) -> None:
    _add(group, "--validation-fraction", number(FRACTION, above=0), "SHARE", default=0.05)
    _add(group, "--seed", whole(SEED), "N", default=0)
    _add(group, "--exclude", amounts.parse_names, "GLOB,GLOB", action=Once)
    _add(group, "--files-share", number(FRACTION, above=0), "SHARE")
    _add(group, "--sets", amounts.parse_names, "NAME,NAME", action=Once)
    _add(group, "--exclude-sets", amounts.parse_names, "NAME,NAME", action=Once)
    _add(group, "--tokens", whole(TOKENS.at_least(1)), "N")
    _add(group, "--mixture", amounts.parse_numbers_by_set, "SET=WEIGHT,…", action=Once)
    _add(group, "--max-repeats", whole(REPEATS), "N", default=4)
    _add(group, "--repeat", amounts.parse_numbers_by_set, "SET=TIMES,…", action=Once)
    _add(group, "--max-documents", whole(DOCUMENTS), "N")
    _add(group, "--max-bytes", whole(TEXT_BYTES), "N")


def _add_running(group: Any) -> None:
    _add(group, "--out", output_path, "DIR", required=True)
    _add(group, "--scratch", output_path, "DIR")
    _add(group, "--workers", whole(WORKERS), "N", default=len(os.sched_getaffinity(0)))
    _add(group, "--stage", choices=("all", "encode", "assemble"), default="all")
    _add(group, "--task", amounts.parse_task, "I/N")
    for flag in ("--estimate", "--overwrite"):
        group.add_argument(flag, action="store_true", help=HELP[flag])


def _check_raw(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise UserError for options that have no effect with or without raw-bytes."""
    if arguments.source != RAW:
        if arguments.splits is not None:
            raise UserError(f"--splits: only with --source {RAW}")
        return
    for name, value in vars(arguments).items():
        default = parser.get_default(name)
        if name not in RAW_OPTIONS and value != default and getattr(value, "text", "") != default:
            raise UserError(f"{_flag(name)}: says nothing with --source {RAW}; leave it out")
    for name, what in (("path", "a file"), ("splits", "bytes of each split, such as 90M,5M,5M")):
        if getattr(arguments, name) is None:
            raise UserError(f"--source {RAW} needs --{name}: {what}")
    if arguments.tokenizer != "bytes":
        raise UserError(f"--tokenizer: --source {RAW} has bytes for ids; give bytes")


def _resolve_source(arguments: argparse.Namespace) -> None:
    """Replace the name of a known data set or a Hub path by its kind, path and keys."""
    given, preset = arguments.source, PRESETS.get(arguments.source)
    arguments.preset = given if preset else None
    if given.startswith(HUB_PREFIX):
        if arguments.path is not None:
            raise UserError(f"--path: does not go with --source {given}, which is a path itself")
        arguments.source, arguments.path = "hub", given
    elif preset:
        arguments.source, arguments.path = preset.kind, arguments.path or preset.path
    elif given not in KINDS:
        known = (*KINDS, f"{HUB_PREFIX}OWNER/NAME", *PRESETS)
        raise UserError(f"--source {clipped(given)}: {one_of(given, known)}")
    arguments.text_key = arguments.text_key or (preset.text_key if preset else TEXT_KEY)
    arguments.set_key = arguments.set_key or (preset.set_key if preset else SET_KEY)


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.validation_fraction < 1:
        value = arguments.validation_fraction
        raise UserError(f"--validation-fraction {value}: must lie between 0 and 1")
    for name, times in (arguments.repeat or {}).items():
        if float(times) > REPEATS.high:
            raise UserError(f"--repeat {name}={times}: must be at most {REPEATS.high:,} times")
    if arguments.files_share is not None and arguments.source not in REPOSITORIES:
        raise UserError(f"--files-share: only with --source {' or '.join(REPOSITORIES)}")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out {arguments.out}: is a file, a folder is needed")
    if arguments.task is not None and arguments.stage != "encode":
        raise UserError("--task goes with --stage encode")
    for first, second in EXCLUSIVE:
        if getattr(arguments, first) is not None and getattr(arguments, second) is not None:
            raise UserError(f"{_flag(first)} does not go with {_flag(second)}; choose one")
    for name in sorted({*(arguments.mixture or ()), *(arguments.repeat or ())}):
        if not amounts.SelectionSpec.of(arguments).holds_out(name):
            raise UserError(f"--mixture or --repeat {name}: the set is left out by the other flags")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@command
def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # End as after Ctrl-C.
    announce(f"{arguments.out}: preparing {arguments.source}")
    # The work is divided among processes. Set this before the library starts its threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.source == RAW:
        from data_prep.assemble import raw_bytes

        raw_bytes.prepare(arguments)
        return
    from data_prep.assemble.pipeline import prepare

    prepare(arguments)


if __name__ == "__main__":
    main()
