"""`python -m eval.length_sweep MODEL [MODEL ...]`: perplexity against context length.

The text is a file (`--text`), WikiText-2 raw as lm-evaluation-harness reads it (`--text wikitext`,
from the Hub or `--data-dir`; a file of that name is ./wikitext), or the validation split of
prepared data (`--data`). Every model is scored on the same tokens at every length (see
perplexity.py for the protocol): their number is the largest multiple of the largest length that the
text (and `--max-tokens`) allows; with `--documents per-document` they are those of all documents
that are as long as the largest length, and of WikiText those of all pages.
Models with another tokenizer than the first one's get the same text in their own tokens; compare
those by bits per byte.

Beyond the training length a model can be read as it is (`none`) or with scaled positions and
attention temperature: see cat_lm/pretrained/conversion.py for what has which.

OUT gets length_sweep.json, .csv, .png and .svg, loss_by_position.png and .svg, and cells/, one
file for each finished combination, which a later call does not compute again.
"""

from __future__ import annotations

import argparse

from cat_lm.core import numbers
from cat_lm.core.cli import (
    Parser,
    add_skip_checksums,
    number,
    output_path,
    path_name,
    whole,
    whole_numbers,
)
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import quiet_transformers
from cat_lm.pretrained.record import comparing_files
from eval.common.precision import DTYPES, HELP
from eval.length_sweep.cells import DOCUMENTS
from eval.length_sweep.sweep import sweep, table
from eval.length_sweep.text import WIKITEXT

# Options that choose among a text's tokens.
OTHER_TEXT = ("documents", "document_separator", "min_document_tokens", "max_document_tokens")
OTHER_TEXT += ("max_tokens",)
HELD_OUT = ("validation", "test")


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.length_sweep", description="Perplexity against context length."
    )
    parser.add_argument(
        "models", nargs="+", type=path_name, metavar="MODEL", help="transformers or run folder"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text",
        type=path_name,
        metavar="FILE",
        help="UTF-8 text; wikitext: WikiText-2 raw (test), page by page as eval.zero_shot has it",
    )
    source.add_argument(
        "--data", type=path_name, metavar="DIR", help="prepared data; its validation split"
    )
    parser.add_argument(
        "--split", choices=HELD_OUT, help="of --data (default: validation; raw bytes have a test)"
    )
    lengths = whole_numbers(numbers.CONTEXT, "256,512")
    parser.add_argument("--lengths", type=lengths, required=True, metavar="256,512,...")
    parser.add_argument(
        "--methods",
        default="none",
        help="of none,pi,pi+temperature,yarn (rotary positions) and none,temperature (without); "
        "all: those that exist for each model; paper: those of the paper's figure (default: none)",
    )
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")
    parser.add_argument(
        "--max-tokens",
        type=whole(numbers.SCORED_TOKENS),
        metavar="N",
        help="score at most N tokens",
    )
    parser.add_argument(
        "--skip-tokens",
        type=whole(numbers.SCORED_TOKENS),
        default=0,
        metavar="N",
        help="of --data: leave out the first N tokens of the split, on which training validates; "
        "per-document: all documents that begin there (default: none)",
    )
    _add_protocol(parser.add_argument_group("protocol"))
    _add_scaling(parser.add_argument_group("scaling"))
    _add_computing(parser.add_argument_group("computing"))
    add_skip_checksums(parser)
    return parser


def _add_protocol(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stride",
        type=whole(numbers.CONTEXT),
        metavar="N",
        help="move windows on by N tokens (default: the length)",
    )
    group.add_argument(
        "--data-dir",
        type=path_name,
        metavar="DIR",
        help="of --text wikitext: rows from DIR/wikitext.jsonl, no network",
    )
    group.add_argument(
        "--documents",
        choices=DOCUMENTS,
        help="whether windows cross the ends of documents (default: they do)",
    )
    group.add_argument(
        "--document-separator", metavar="REGEX", help="between the documents of --text"
    )
    group.add_argument(
        "--min-document-tokens",
        type=whole(numbers.SCORED_TOKENS),
        metavar="N",
        help="per-document: leave shorter documents out (default: the largest length)",
    )
    group.add_argument(
        "--max-document-tokens",
        type=whole(numbers.SCORED_TOKENS),
        metavar="N",
        help="per-document: of longer documents score the first N tokens (default: all)",
    )


def _add_scaling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--factor",
        type=number(numbers.SCALING_FACTOR),
        metavar="S",
        help="one scaling factor for all lengths (default: test length / training length, >= 1)",
    )
    group.add_argument(
        "--temperature-scope",
        choices=("logits", "rotary"),
        default="logits",
        help="what the temperature acts on; rotary: the rotated channels, as in transformers",
    )
    group.add_argument(
        "--training-length",
        type=whole(numbers.CONTEXT),
        metavar="N",
        help="default: what the model's folder says",
    )


def _add_computing(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", choices=DTYPES, default="auto", help=HELP)
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    group.add_argument(
        "--batch-tokens",
        type=whole(numbers.BATCH_TOKENS),
        default=8192,
        metavar="N",
        help="tokens per forward pass",
    )


@command
def main() -> None:
    arguments = parser().parse_args()
    check_output(arguments.out)
    _check(arguments)
    quiet_transformers()
    arguments.documents = arguments.documents or DOCUMENTS[0]
    arguments.split = arguments.split or HELD_OUT[0]
    options = vars(arguments)
    with comparing_files(skip=options.pop("skip_checksums")):
        rows = sweep(
            options.pop("models"),
            options.pop("lengths"),
            options.pop("out"),
            methods=[method.strip() for method in options.pop("methods").split(",")],
            **options,
        )
    print(table(rows))


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other."""
    largest = max(arguments.lengths)
    if arguments.text == WIKITEXT:
        _check_wikitext(arguments)
    elif arguments.data_dir is not None:
        raise UserError(f"--data-dir {arguments.data_dir}: only with --text {WIKITEXT}")
    if arguments.split is not None and arguments.data is None:
        raise UserError(f"--split {arguments.split}: only with --data")
    if arguments.skip_tokens and arguments.data is None:
        raise UserError(f"--skip-tokens {arguments.skip_tokens}: only with --data")
    if arguments.stride is not None and arguments.stride > largest:
        raise UserError(
            f"--stride {arguments.stride}: does nothing, the largest of --lengths is {largest}"
        )
    if arguments.max_tokens is not None and arguments.max_tokens < largest:
        raise UserError(
            f"--max-tokens {arguments.max_tokens}: must be at least the largest of --lengths, "
            f"{largest}"
        )
    for name in ("min", "max"):
        given = getattr(arguments, f"{name}_document_tokens")
        if given and arguments.documents != "per-document":
            raise UserError(f"--{name}-document-tokens: only with --documents per-document")
    least = max(largest, arguments.min_document_tokens or 0)
    if arguments.max_document_tokens is not None and arguments.max_document_tokens < least:
        raise UserError(
            f"--max-document-tokens {arguments.max_document_tokens}: must be at least {least}, the "
            "largest of --lengths and --min-document-tokens"
        )
    if arguments.document_separator is not None and arguments.text is None:
        raise UserError(
            "--document-separator: only with --text; prepared data know their documents"
        )


def _check_wikitext(arguments: argparse.Namespace) -> None:
    """Raises UserError for an option that would score other text than the harness does."""
    for name in OTHER_TEXT:
        value = getattr(arguments, name)
        if value is not None:
            raise UserError(
                f"--{name.replace('_', '-')} {value}: not with --text {WIKITEXT}, all of whose "
                "pages are scored, one by one"
            )


if __name__ == "__main__":
    main()
