"""`python -m eval.long_range`: long-range tasks and LaS attention."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, output_path, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import choose_device
from eval.common.options import add_options
from eval.long_range.recipes import recipe_of
from eval.long_range.settings import Settings
from eval.long_range.tasks.commands import add_place, add_prepare, add_show, place_of

if TYPE_CHECKING:
    from eval.long_range.cell import Cell


@command
def main() -> None:
    parser = Parser(
        prog="python -m eval.long_range",
        description="Long-range tasks: which mixers learn from hundreds to thousands of positions.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add_prepare(commands)
    add_show(commands)
    _add_run(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _tasks_and_mixers() -> tuple[str, str]:
    from cat_lm import mixers as registry
    from eval.long_range.mixers import VARIANTS
    from eval.long_range.tasks import TASKS

    return ", ".join(TASKS.names()), ", ".join((*VARIANTS, *registry.names()))


def _add_direction(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--direction",
        choices=("causal", "both"),
        default="causal",
        help="causal models, as all of the paper's, or encoders that read both sides "
        "(default: causal)",
    )


def _add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="train and test one model",
        description="Trains a model on a task and tests the one of the best validation, once. What "
        "is left out is the task's in the paper. OUT/cells gets one JSON; a finished one is kept.",
    )
    tasks, known = _tasks_and_mixers()
    add = parser.add_argument
    add("--task", required=True, help=f"{tasks}; options as listops:max_length=200")
    add("--mixer", required=True, help=f"{known}; options as las:chunk=128,position=none")
    add("--out", type=output_path, required=True, metavar="DIR", help="results")
    _add_direction(parser)
    # What is left out is the task's: only options that were given reach the cell.
    defaults = dict.fromkeys(recipe_of("listops").cell_options(), argparse.SUPPRESS)
    add_options(parser, Settings, defaults=defaults)
    add("--shuffle-labels", action="store_true", help="a control: train with other rows' labels")
    add("--workers", type=whole(numbers.WORKERS), default=1, help="processes that prepare rows")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    add_place(parser)
    parser.set_defaults(run=_run)


def _cell(arguments: argparse.Namespace) -> Cell:
    """Make the cell that options name; what they leave out is the task's in the paper."""
    from eval.long_range.cell import Cell
    from eval.long_range.grids import fitted
    from eval.long_range.tasks import make_task

    values, task = vars(arguments), arguments.task.partition(":")[0]
    if "pool" in values and make_task(arguments.task).scored:
        raise UserError(f"--pool: has no effect on {task}, which has no classes; leave it out")
    options = recipe_of(task).cell_options()
    options |= {name: values[name] for name in options if name in values}
    names = ("task", "seed", "eval_steps", "train_rows", "validation_rows", "test_rows")
    return Cell(
        mixer=fitted(arguments.mixer, task),
        **{name: values[name] for name in names},
        **options,
        is_causal=arguments.direction == "causal",
        is_shuffled=arguments.shuffle_labels,
        place=place_of(arguments, arguments.workers, make_task(arguments.task)),
    )


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments.out)
    from eval.lab.cell import cell_path, run
    from eval.long_range.origins import check_origins

    cell = _cell(arguments)
    check_origins(arguments.out, [cell])
    record = run(arguments.out, cell, str(choose_device(arguments.device)))
    for note in record["notes"]:
        print(note)
    seconds = record["seconds"]["training"]
    print(
        f"{record['metric']} {record['value']:.4f} (validation {record['validation']['value']:.4f} "
        f"at step {record['validation']['step']}); {record['steps']} steps in {seconds:.0f} s; "
        f"{cell_path(arguments.out, cell)}"
    )


if __name__ == "__main__":
    main()
