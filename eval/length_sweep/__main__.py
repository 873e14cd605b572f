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

from cat_lm.core.cli import Parser, add_skip_checksums, output_path, path_name
from cat_lm.core.errors import command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import begin
from cat_lm.pretrained.record import comparing_files
from eval.common.options import add_options, options_of
from eval.length_sweep.options import Options


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = Parser(
        prog="python -m eval.length_sweep", description="Perplexity against context length."
    )
    parser.add_argument(
        "models",
        nargs="+",
        type=path_name,
        metavar="MODEL",
        help="transformers folder or run folder of a model",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    text = "UTF-8 text; wikitext: WikiText-2 raw (test), page by page as eval.zero_shot has it"
    source.add_argument("--text", type=path_name, metavar="FILE", help=text)
    data = "prepared data; its validation split"
    source.add_argument("--data", type=path_name, metavar="DIR", help=data)
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")
    add_options(parser, Options)
    add_skip_checksums(parser)
    return parser


@command
def main() -> None:
    arguments = parser().parse_args()
    check_output(arguments.out)
    asked = options_of(arguments, Options)
    asked.check()
    begin(*arguments.models)
    from eval.length_sweep.sweep import fill_sweep, table

    with comparing_files(skip=arguments.skip_checksums):
        print(table(fill_sweep(arguments.models, asked, arguments.out)))


if __name__ == "__main__":
    main()
