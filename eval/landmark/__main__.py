"""`python -m eval.landmark sweep|diagnose`: what trained models lose that read chosen blocks.

`sweep` scores models on a text, dense and with each way to choose blocks, and writes
landmark_sweep.json, .csv, .png and .svg into OUT, beside cells/ and learned/, from which a later
call resumes. `diagnose` measures what the products of a model's heads are, and says which block
size and how many blocks it tolerates: diagnosis.json, .csv, .png and .svg.
"""

from __future__ import annotations

import argparse

from cat_lm.core.cli import Parser, add_skip_checksums, output_path, path_name
from cat_lm.core.errors import command
from cat_lm.core.folders import check_output
from eval.common.options import add_options, options_of
from eval.landmark.options import Grid, Questions

_FOLDER = {"type": path_name, "metavar": "MODEL", "help": "transformers or run folder"}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.landmark",
        description="What trained models lose where they read chosen blocks of keys alone.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sweep = commands.add_parser("sweep", help="perplexity against the share of keys read")
    sweep.add_argument("models", nargs="+", **_FOLDER)
    diagnose = commands.add_parser("diagnose", help="which block size a model tolerates")
    diagnose.add_argument("model", **_FOLDER)
    for one, asked in ((sweep, Grid), (diagnose, Questions)):
        source = one.add_mutually_exclusive_group(required=True)
        source.add_argument(
            "--text", type=path_name, metavar="FILE", help="UTF-8 text file to score"
        )
        source.add_argument(
            "--data",
            type=path_name,
            metavar="DIR",
            help="prepared data, whose validation split is scored",
        )
        add_options(one, asked)
        one.add_argument("--out", type=output_path, required=True, metavar="DIR")
        one.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:1, …")
        add_skip_checksums(one)
        one.set_defaults(asked=asked)
    return parser


@command
def main() -> None:
    options = _parser().parse_args()
    check_output(options.out)
    from cat_lm.pretrained.loading import begin
    from cat_lm.pretrained.record import comparing_files

    begin(*(options.models if options.command == "sweep" else [options.model]))
    asked = options_of(options, options.asked)
    how = {name: getattr(options, name) for name in ("text", "data", "device")}
    with comparing_files(skip=options.skip_checksums):
        if options.command == "sweep":
            from eval.landmark import sweep

            print(sweep.table(sweep.sweep(options.models, asked, options.out, **how)))
        else:
            from eval.landmark import diagnose

            print(diagnose.table(diagnose.diagnose(options.model, asked, options.out, **how)))


if __name__ == "__main__":
    main()
