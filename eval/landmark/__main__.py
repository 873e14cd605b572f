"""`python -m eval.landmark sweep|diagnose|figure|study`: what models lose that read chosen blocks.

`sweep` scores models on a text, dense and with each way to choose blocks, and writes
landmark_sweep.json, .csv, .png and .svg into OUT, beside cells/ and learned/, from which a later
call goes on. `diagnose` measures what the products of a model's heads are, and says which block
size and how many blocks it bears: diagnosis.json and .csv. `figure` draws the records of both, and
one of `eval.speed decode --contexts`, beside what models of `eval.recall` find at every length, as
up to four panels: landmark.json, .png and .svg. `study` trains models and does all of it.
"""

from __future__ import annotations

import argparse

from cat_lm.core import numbers
from cat_lm.core.cli import (
    Parser,
    add_skip_checksums,
    listed,
    number,
    output_path,
    path,
    path_name,
    whole,
    whole_numbers,
)
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from eval.landmark.choices import SELECTORS, STATE, USUAL
from eval.landmark.study import POSITIONS, SCALES, conduct, entered, settings, shown, stages


def _selector(text: str) -> str:
    if text not in SELECTORS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(SELECTORS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.landmark",
        description="What trained models lose where they read chosen blocks of keys alone.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_sweep(commands.add_parser("sweep", help="perplexity against the share of keys read"))
    _add_diagnose(commands.add_parser("diagnose", help="which block size a model bears"))
    _add_figure(commands.add_parser("figure", help="up to four panels of what was measured"))
    _add_study(commands.add_parser("study", help="trains models, and does all of it"))
    return parser


def _add_figure(parser: argparse.ArgumentParser) -> None:
    for name, what in (("diagnoses", "diagnosis.json"), ("sweeps", "landmark_sweep.json")):
        parser.add_argument(
            f"--{name}", nargs="+", type=path, default=(), metavar="FILE", help=f"{what} of models"
        )
    parser.add_argument(
        "--recall",
        nargs="+",
        type=path,
        default=(),
        metavar="DIR",
        help="of eval.recall run, with models of the task needle",
    )
    parser.add_argument(
        "--contexts", type=path, metavar="FILE", help="record of eval.speed decode --contexts"
    )
    parser.add_argument(
        "--block",
        type=whole(numbers.CONTEXT),
        metavar="N",
        help="of the sweeps (default: the smallest that all have)",
    )
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains small CAT models with attention to all keys, with a loss for landmarks and "
        "without, and measures what they lose with chosen blocks, at four times the length."
    )
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="default: cpu")
    parser.add_argument(
        "--positions",
        type=listed(_position, "none,rope"),
        default=POSITIONS[:1],
        metavar="LIST",
        help="of none, rope (default: none)",
    )
    parser.add_argument(
        "--seeds",
        type=whole_numbers(numbers.SEED, "0,1,2"),
        default=(0, 1, 2),
        metavar="LIST",
        help="default: 0,1,2",
    )
    parser.add_argument(
        "--data",
        type=path,
        metavar="DIR",
        help="prepared text (default: the standard library without codec tables)",
    )
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")


def _position(text: str) -> str:
    if text not in POSITIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(POSITIONS)}")
    return text


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", type=path_name, metavar="MODEL", help="transformers or run folder"
    )
    _add_text(parser)
    parser.add_argument(
        "--lengths", type=whole_numbers(numbers.CONTEXT, "256,512"), required=True, metavar="LIST"
    )
    _add_choice(parser, "16,32,64", "1,2,4,8")
    parser.add_argument(
        "--select",
        type=listed(_selector, "box,local"),
        default=USUAL,
        metavar="LIST",
        help=f"of {', '.join(SELECTORS)} (default: those that are not learned)",
    )
    parser.add_argument(
        "--calibrate", metavar="DATA", help="prepared data that selectors are learned from"
    )
    parser.add_argument(
        "--tokens", type=whole(numbers.TOKENS.at_least(1)), help="of it (default: 1,000,000)"
    )
    parser.add_argument(
        "--state",
        type=whole(numbers.CONV_STATE.at_least(1)),
        metavar="N",
        help=f"of --select ssm: numbers of state for each channel (default: {STATE})",
    )
    parser.add_argument(
        "--max-tokens",
        type=whole(numbers.SCORED_TOKENS),
        metavar="N",
        help="score at most N tokens",
    )
    parser.add_argument(
        "--batch-tokens",
        type=whole(numbers.BATCH_TOKENS),
        default=8192,
        metavar="N",
        help="tokens per forward pass",
    )
    _add_computing(parser)


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=path_name, metavar="MODEL", help="transformers or run folder")
    _add_text(parser)
    parser.add_argument("--length", type=whole(numbers.CONTEXT), required=True, metavar="N")
    parser.add_argument(
        "--windows",
        type=whole(numbers.Range(1, 10**6)),
        default=8,
        metavar="N",
        help="of the text (default: 8)",
    )
    parser.add_argument(
        "--queries",
        type=whole(numbers.CONTEXT),
        default=64,
        metavar="N",
        help="of each window (default: 64)",
    )
    _add_choice(parser, "8,16,32,64", "1,2,4,8,16")
    parser.add_argument(
        "--wanted",
        type=number(numbers.FRACTION),
        default=0.9,
        metavar="SHARE",
        help="of what dense attention finds (default: 0.9)",
    )
    _add_computing(parser)


def _add_text(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=path_name, metavar="FILE", help="UTF-8 text")
    source.add_argument(
        "--data", type=path_name, metavar="DIR", help="prepared data; its validation split"
    )


def _add_choice(parser: argparse.ArgumentParser, blocks: str, top_k: str) -> None:
    for name, usual, what in (
        ("blocks", blocks, "tokens of a block"),
        ("top-k", top_k, "blocks chosen"),
    ):
        parse = whole_numbers(numbers.CONTEXT, usual)
        parser.add_argument(
            f"--{name}",
            type=parse,
            default=parse(usual),
            metavar="LIST",
            help=f"{what} (default: {usual})",
        )
    parser.add_argument(
        "--local",
        type=whole(numbers.CONTEXT),
        default=2,
        metavar="N",
        help="blocks near the query that it always reads (default: 2)",
    )


def _add_computing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    add_skip_checksums(parser)


@command
def main() -> None:
    options = _parser().parse_args()
    check_output(options.out)
    if options.command == "study":
        _study(options)
        return
    if options.command == "figure":
        print(_figure(options))
        return
    from cat_lm.pretrained.loading import quiet_transformers
    from cat_lm.pretrained.record import comparing_files

    quiet_transformers()
    with comparing_files(skip=options.skip_checksums):
        print({"sweep": _sweep, "diagnose": _diagnose}[options.command](options))


def _figure(options: argparse.Namespace) -> str:
    if not (options.recall or options.diagnoses or options.sweeps or options.contexts):
        given = "--recall, --diagnoses, --sweeps or --contexts"
        raise UserError(f"figure: nothing to draw; give {given}")
    if options.block is not None and not options.sweeps:
        raise UserError(f"--block {options.block}: says nothing without --sweeps")
    from eval.landmark.summary import summarise, table

    parts = (options.diagnoses, options.sweeps, options.contexts, options.block, options.recall)
    return table(summarise(options.out, *parts))


def _study(options: argparse.Namespace) -> None:
    data, out = options.data and options.data.resolve(), options.out.resolve()
    wanted = settings(options.scale, data, verified=not options.list)
    positions, seeds = (tuple(dict.fromkeys(x)) for x in (options.positions, options.seeds))
    found = stages(SCALES[options.scale], out, data, positions, seeds)
    if options.list:
        print("\n".join([entered(), *map(shown, found)]))
        return
    conduct(found, out, wanted)


def _sweep(options: argparse.Namespace) -> str:
    from eval.landmark.sweep import Grid, sweep, table

    if options.tokens is not None and options.calibrate is None:
        raise UserError(f"--tokens {options.tokens}: says nothing without --calibrate")
    lessons = None
    if options.calibrate is not None:
        lessons = options.calibrate, options.tokens or 1_000_000
    select = tuple(dict.fromkeys(options.select))
    if options.state is not None and "ssm" not in select:
        raise UserError(f"--state {options.state}: says nothing without --select ssm")
    choice = options.blocks, options.top_k, options.local
    grid = Grid(options.lengths, select, *choice, options.state or STATE)
    rows = sweep(
        options.models,
        grid,
        options.out,
        text=options.text,
        data=options.data,
        lessons=lessons,
        max_tokens=options.max_tokens,
        device=options.device,
        batch_tokens=options.batch_tokens,
    )
    return table(rows)


def _diagnose(options: argparse.Namespace) -> str:
    from eval.landmark.diagnose import Questions, diagnose, table

    questions = Questions(
        options.length,
        options.windows,
        options.queries,
        options.blocks,
        options.top_k,
        options.local,
        options.wanted,
    )
    record = diagnose(
        options.model,
        questions,
        options.out,
        text=options.text,
        data=options.data,
        device=options.device,
    )
    return table(record)


if __name__ == "__main__":
    main()
