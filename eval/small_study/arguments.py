"""The small study's command line, and the study that it asks for."""

from __future__ import annotations

import argparse
from pathlib import Path

from cat_lm import limits
from cat_lm.cli import Parser, path, rates, whole, whole_numbers
from cat_lm.config_sections import parse_count
from cat_lm.errors import UserError
from cat_lm.io.readers import clipped
from eval.small_study.plan import ROOT, SEEDS, SIZES, TUNING_SEED, Study
from eval.small_study.questions import QUESTIONS


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="bash eval/small_study.sh",
        description="Trains models at the same size, data, seeds and budget, sweeps their context "
        "length, and compares them. A stopped study goes on where it was.",
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="cpu", help="cpu: under an hour on two cores; gpu: larger")
    add(
        "--question",
        choices=QUESTIONS,
        default="variants",
        help="; ".join(f"{name}: {question.text}" for name, question in QUESTIONS.items()),
    )
    add("--out", type=path, metavar="DIR", help="default: runs/small_study-SIZE (-QUESTION)")
    add(
        "--data",
        type=path,
        metavar="DIR",
        help="prepared text of your own (default: the standard library's source, prepared in "
        "data/small_study_text-SIZE)",
    )
    add(
        "--held-out",
        type=_folders,
        default=(),
        metavar="DIR,…",
        help="further prepared text with the same tokenizer, scored beside the data's",
    )
    add(
        "--documents",
        type=whole(limits.ROWS.at_least(2)),
        metavar="N",
        help="held-out documents that are scored of each text (default: cpu: 200; gpu: 100)",
    )
    _add_training(parser)
    return parser.parse_args(argv)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", help="some of the question's (default: all)")
    add(
        "--seeds",
        type=whole_numbers(limits.SEED, "0,1,2", distinct=True),
        default=SEEDS,
        metavar="N,N,…",
        help=f"default: {','.join(map(str, SEEDS))}",
    )
    add(
        "--rates",
        type=_rates,
        default=(),
        metavar="R,R,R",
        help=f"choose each model's learning rate among these by runs of seed {TUNING_SEED}, which "
        "are not reported (default: the config's rate for all)",
    )
    add(
        "--tokens",
        type=_tokens,
        metavar="N",
        help="training tokens of a run, such as 1B (default: the config's)",
    )
    add(
        "--parallel",
        type=whole(limits.WORKERS),
        metavar="N",
        help="runs at once (default: cpu: the cores; gpu: 1)",
    )
    add("--estimate", action="store_true", help="measure how long it would take, and stop")


def _tokens(text: str) -> int:
    try:
        # The tables print 20K, whose lower case is as clear.
        count = parse_count(text.upper())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} {error}") from None
    if problem := limits.TOKENS.at_least(1).problem(count):
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} {problem}")
    return count


def _rates(text: str) -> tuple[float, ...]:
    found = rates(text)
    if len(found) < 3:
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} must be three or more different rates")
    return found


def _folders(text: str) -> tuple[Path, ...]:
    found = tuple(path(part) for part in text.split(","))
    names = [folder.name for folder in found]
    if len(set(names)) < len(names) or "" in names:
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} must be folders of different names")
    return found


def study_of(arguments: argparse.Namespace) -> Study:
    """The study that the command line asks for. Raises UserError where it makes no sense."""
    size, asked = SIZES[arguments.size], QUESTIONS[arguments.question]
    models = tuple(arguments.models.split(",")) if arguments.models else asked.models
    for model in models:
        if model not in asked.models:
            known = f"--question {arguments.question}, which has {', '.join(asked.models)}"
            raise UserError(f"--models {clipped(model)}: is not of {known}")
    if TUNING_SEED in arguments.seeds and arguments.rates:
        raise UserError(f"--seeds {TUNING_SEED}: chooses the rates, and is not reported")
    study = _named(arguments, tuple(model for model in asked.models if model in models))
    for job in study.jobs()[: len(study.models)]:
        config = study.config(job)
        for problem in config.architecture.problems(config.model, max(study.lengths())):
            raise UserError(
                f"--size {size.name} --question {arguments.question}: {job.model} is to be read up "
                f"to {max(study.lengths())} tokens; {problem}"
            )
    return study


def _named(arguments: argparse.Namespace, models: tuple[str, ...]) -> Study:
    """The study of some models, in its folders."""
    size = SIZES[arguments.size]
    suffix = "" if arguments.question == "variants" else f"-{arguments.question}"
    return Study(
        size=size,
        models=models,
        seeds=arguments.seeds,
        out=_from_root(arguments.out or ROOT / f"runs/small_study-{size.name}{suffix}"),
        data=_from_root(arguments.data or ROOT / f"data/small_study_text-{size.name}"),
        tokens=arguments.tokens,
        question=arguments.question,
        documents=arguments.documents,
        held_out=tuple(map(_from_root, arguments.held_out)),
        rates=arguments.rates,
    )


def _from_root(path: Path) -> Path:
    """Short where it lies in the checkout, where all commands run; absolute elsewhere."""
    path = path.absolute()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
