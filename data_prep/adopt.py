"""Turn token shards of other tools into prepared data: python -m data_prep.adopt PREFIX …"""

from __future__ import annotations

import argparse
import os

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, announce, output_path, whole
from cat_lm.core.errors import UserError, command

DOCUMENTS = ("marks", "sequences", "eod")
LINKS = ("hard", "symbolic", "copy")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and check what can be checked without reading files."""
    parser = Parser(
        prog="python -m data_prep.adopt",
        description="Makes a prepared folder of .bin/.idx files that GPT-NeoX's or Megatron-LM's "
        "preprocessing wrote. Every token is read: ids must lie in the vocabulary, and each "
        "document must end with the end-of-document token and hold no other. The .bin files are "
        "linked or copied, the indices are written anew, one sequence for each document.",
    )
    add = parser.add_argument
    add(
        "prefixes",
        nargs="+",
        metavar="[NAME=]PREFIX",
        help="training data: a path without .bin and .idx; NAME is the name of the set "
        "(default: the file's name)",
    )
    add(
        "--validation",
        nargs="+",
        default=[],
        metavar="[NAME=]PREFIX",
        help="validation data: paths without .bin and .idx",
    )
    add(
        "--validation-documents",
        type=whole(numbers.DOCUMENTS),
        metavar="N",
        help="instead of --validation: hold out the last N documents of the last PREFIX (with "
        "--link copy)",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="SPEC",
        help="the tokenizer that made them: tokenizer.json or a folder, a sentencepiece *.model, "
        "OWNER/NAME[@REVISION] on the Hub, or bytes",
    )
    add("--eod-token", help="end-of-document token (default: the tokenizer's own)")
    add(
        "--documents",
        choices=DOCUMENTS,
        default="marks",
        help="what a document is: what the index marks (default), each sequence (as in GPT-NeoX, "
        "whose merged files have no marks), or all tokens up to an EOD",
    )
    add(
        "--link",
        choices=LINKS,
        default="hard",
        help="how to put the .bin files into DIR (default: hard links, on the same file system)",
    )
    add("--out", required=True, type=output_path, metavar="DIR", help="folder for the result")
    arguments = parser.parse_args(argv)
    _check(arguments)
    return arguments


def _check(arguments: argparse.Namespace) -> None:
    if arguments.tokenizer.startswith("train:"):
        raise UserError(
            f"--tokenizer {arguments.tokenizer}: the tokens are there already; give the tokenizer "
            "that made them"
        )
    held_out = arguments.validation_documents
    if bool(arguments.validation) == (held_out is not None):
        raise UserError("give held-out data: either --validation or --validation-documents")
    if held_out is None:
        return
    if arguments.link != "copy":
        raise UserError(
            f"--validation-documents {held_out}: cuts a .bin in two, which needs --link copy"
        )


@command
def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    announce(f"{arguments.out}: adopting {', '.join(arguments.prefixes)}")
    from data_prep.megatron.convert import adopt

    adopt(arguments)


if __name__ == "__main__":
    main()
