"""The small study's command line, and the study that it asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, listed, output_path, path, rates, whole, whole_numbers
from cat_lm.core.errors import UserError
from cat_lm.core.readers import clipped
from eval.small_study.plan import ROOT, SEEDS, SIZES, TUNING_SEED, Study, tuning_seeds
from eval.small_study.questions import QUESTIONS, Question


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="bash eval/small_study.sh",
        description="Trains models at the same size, data, seeds and budget, sweeps their context "
        "length, and compares them. A stopped study goes on where it was.",
    )
    parser.add_argument(
        "--question",
        choices=QUESTIONS,
        default="variants",
        help="; ".join(f"{name}: {question.text}" for name, question in QUESTIONS.items()),
    )
    add_options(
        parser,
        cpu="under an hour on two cores",
        out="runs/small_study-SIZE (-QUESTION)",
        models="some of the question's",
        rates="the config's rate for all",
        tokens="the config's",
        documents="cpu: 150; gpu: 80",
    )
    return parser.parse_args(argv)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    cpu: str,
    out: str,
    models: str,
    rates: str,
    tokens: str,
    documents: str,
    seeds: tuple[int, ...] = SEEDS,
) -> None:
    """Add what every comparison on the study's machinery has.

    Args:
        cpu: how long the size takes.
        out, rates, tokens, documents: their defaults, in words.
        models: what --models names.
        seeds: the default.
    """
    add = parser.add_argument
    add("--size", choices=SIZES, default="cpu", help=f"cpu: {cpu}; gpu: larger")
    add("--out", type=output_path, metavar="DIR", help=f"default: {out}")
    add(
        "--data",
        type=path,
        metavar="DIR",
        help="prepared text of your own (default: the standard library's source but its codec "
        "tables, prepared in data/small_study_text-SIZE)",
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
        type=whole(numbers.ROWS.at_least(2)),
        metavar="N",
        help=f"held-out documents that are scored of each text (default: {documents})",
    )
    add("--models", help=f"{models} (default: all)")
    add(
        "--reuse",
        type=listed(path, "runs/rivals-cpu,runs/small_study-cpu"),
        default=(),
        metavar="DIR,…",
        help="take trainings over from these studies where model, text, tokens, rates and seed are "
        "the same",
    )
    _add_training(parser, rates, tokens, seeds)


def _add_training(
    parser: argparse.ArgumentParser, rates: str, tokens: str, seeds: tuple[int, ...]
) -> None:
    add = parser.add_argument
    add(
        "--seeds",
        type=whole_numbers(numbers.SEED, "0,1,2", distinct=True),
        default=seeds,
        metavar="N,N,…",
        help=f"default: {','.join(map(str, seeds))}",
    )
    add(
        "--rates",
        type=_rates,
        default=(),
        metavar="R,R,R",
        help=f"choose each model's learning rate among these by runs of seed {TUNING_SEED}, which "
        f"are not reported (default: {rates})",
    )
    add(
        "--tuning-seeds",
        type=whole(numbers.REPEATS),
        default=1,
        metavar="N",
        help=f"runs at each of the --rates, of seeds {TUNING_SEED}, {TUNING_SEED + 1}, …, whose "
        "mean chooses (default: 1)",
    )
    add(
        "--tokens",
        type=whole(numbers.TOKENS.at_least(1)),
        metavar="N",
        help=f"training tokens of a run, such as 1B (default: {tokens})",
    )
    add(
        "--parallel",
        type=whole(numbers.WORKERS),
        metavar="N",
        help="runs at once (default: cpu: the cores; gpu: 1)",
    )
    add("--estimate", action="store_true", help="measure how long it would take, and stop")


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
    question = f"--question {arguments.question}"
    suffix = "" if arguments.question == "variants" else f"-{arguments.question}"
    study = Study(
        size=size,
        models=chosen_models(arguments, asked, question),
        out=from_root(arguments.out or ROOT / f"runs/small_study-{size.name}{suffix}"),
        question=arguments.question,
        **common_values(arguments),
    )
    for job in study.jobs()[: len(study.models)]:
        config = study.config(job)
        for problem in config.architecture.problems(config.model, max(study.lengths())):
            raise UserError(
                f"--size {size.name} --question {arguments.question}: {job.model} is to be read up "
                f"to {max(study.lengths())} tokens; {problem}"
            )
    return study


def chosen_models(arguments: argparse.Namespace, asked: Question, which: str) -> tuple[str, ...]:
    """The models that are asked for, in the question's order.

    Args:
        which: the question, for people.

    Raises:
        UserError: the question has no such model.
    """
    models = tuple(arguments.models.split(",")) if arguments.models else asked.models
    for model in models:
        if model not in asked.models:
            known = f"{which}, which has {', '.join(asked.models)}"
            raise UserError(f"--models {clipped(model)}: is not of {known}")
    return tuple(model for model in asked.models if model in models)


def common_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a `Study` is given by `add_options`. Raises UserError where it makes no sense."""
    choosing = set(tuning_seeds(arguments.tuning_seeds) if arguments.rates else ())
    for seed in choosing.intersection(arguments.seeds):
        raise UserError(f"--seeds {seed}: chooses the rates, and is not reported")
    if arguments.tuning_seeds > 1 and not arguments.rates:
        raise UserError("--tuning-seeds: chooses among --rates, of which there are none")
    return {
        "seeds": arguments.seeds,
        "data": from_root(arguments.data or ROOT / f"data/small_study_text-{arguments.size}"),
        "tokens": arguments.tokens,
        "documents": arguments.documents,
        "held_out": tuple(map(from_root, arguments.held_out)),
        "rates": arguments.rates,
        "tuning_seeds": arguments.tuning_seeds,
        "reuse": tuple(map(from_root, arguments.reuse)),
    }


def from_root(path: Path) -> Path:
    """Short where it lies in the checkout, where all commands run; absolute elsewhere."""
    path = path.absolute()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
