"""Show and check the contents of prepared data: python -m data_prep.inspect DIR."""

from __future__ import annotations

import argparse
import os

from cat_lm.core.cli import Parser, announce, output_file, output_path, path, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.core.numbers import CONTEXT, SAMPLES, WORKERS, Range
from cat_lm.core.outputs import claim_file, claim_outputs

EXIT_CODES = """exit codes:
  0  intact
  1  intact, with duplicates of the type in --fail-on-duplicates
  2  damaged (one line on stderr, all findings in --json), no prepared data, or a wrong argument
"""
HELP = {
    "folder": "folder that data_prep.prepare has written",
    "--samples": "number of documents and windows to show (default: 2)",
    "--context-length": "tokens per window; the edges of windows are shown (default: 2048)",
    "--no-checksums": "check sizes, headers and counts only",
    "--no-duplicates": "do not search for documents with the same tokens (the search reads all "
    "shards again and needs 8 bytes of --scratch per document)",
    "--fail-on-duplicates": "exit with code 1 if a validation document is in train (across), or "
    "any document occurs twice (any)",
    "--workers": "processes that read shards (default: all cores)",
    "--scratch": "folder for temporary files (default: the system's)",
    "--out": "folder for the plot document_lengths.png",
    "--json": "JSON file for the findings",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data_prep.inspect",
        description="Shows the manifest, the counts per source, the lengths of the documents, "
        "exact duplicates and some decoded samples of prepared data, and checks that they are "
        "intact: SHA-256 of every file, counts, ids, and one end-of-document token (EOD) a "
        "document.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0))
    for flag, kind, metavar, default in (
        ("folder", path, "DIR", None),
        ("--samples", whole(Range(0, SAMPLES.high)), "N", 2),
        ("--context-length", whole(CONTEXT), "T", 2048),
        ("--workers", whole(WORKERS), "N", cores),
        ("--scratch", output_path, "DIR", None),
        ("--out", output_path, "DIR", None),
        ("--json", output_file, "FILE", None),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=HELP[flag])
    for flag in ("--no-checksums", "--no-duplicates"):
        parser.add_argument(flag, action="store_true", help=HELP[flag])
    kinds, flag = ("across", "any"), "--fail-on-duplicates"
    parser.add_argument(flag, choices=kinds, help=HELP[flag])
    arguments = parser.parse_args(argv)
    _check(arguments)
    return arguments


def _check(arguments: argparse.Namespace) -> None:
    if arguments.no_duplicates and arguments.fail_on_duplicates:
        raise UserError("--fail-on-duplicates: not with --no-duplicates")
    if (scratch := arguments.scratch) is not None and not scratch.is_dir():
        what = "not a folder" if scratch.exists() else "no such folder"
        raise UserError(f"--scratch {scratch}: {what}")
    # Check the outputs before the work.
    if arguments.json is not None:
        claim_file(arguments.json, "--json", "python -m data_prep.inspect")
    if arguments.out is not None:
        from data_prep.check.contents import PICTURE

        check_output(arguments.out)
        claim_outputs(arguments.out, PICTURE)


@command
def main() -> None:
    arguments = parse_arguments()
    announce(f"{arguments.folder}: reading the prepared data")
    from data_prep.check.findings import inspect

    if inspect(arguments):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
