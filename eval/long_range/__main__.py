"""`python -m eval.long_range`: prepare and show the data of long-range tasks, train one model."""

from __future__ import annotations

import argparse

import numpy as np

from cat_lm import mixers as registry
from cat_lm.core import numbers
from cat_lm.core.cli import Parser, announce, output_path, path, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import choose_device
from eval.common.options import add_options
from eval.lab.cell import cell_path, run
from eval.long_range.cell import Cell, check_origins, fitted, recipe_of
from eval.long_range.mixers import VARIANTS
from eval.long_range.tasks import SPLITS, TASKS, Examples, Place, Task, check_read, make_task


@command
def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    arguments.run(arguments)


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="python -m eval.long_range",
        description="Long-range tasks: which mixers learn from hundreds to thousands of positions.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="make a task's data, or read its files, and count it",
        description="Makes what a task needs, once, in the cache, and says how many rows of which "
        "classes and lengths there are, and what they come from. Training does the same where it "
        "was not done before.",
    )
    _add_task(prepare)
    prepare.set_defaults(run=_prepare)
    show = commands.add_parser(
        "show",
        help="show rows of a task as a model reads them",
        description="Prints rows of a task: texts and ListOps as text, images as characters, "
        "numbers as numbers; each with its label and length.",
    )
    _add_task(show)
    show.add_argument("--split", choices=SPLITS, default="train")
    most = numbers.Range(1, 1_000)
    show.add_argument("--rows", type=whole(most), default=3, help="rows to show (default: 3)")
    show.set_defaults(run=_show)
    _add_run(commands)
    return parser


def _add_task(parser: argparse.ArgumentParser) -> None:
    tasks = f"{', '.join(TASKS.names())}; options as listops:max_length=200,train=1000"
    parser.add_argument("task", metavar="TASK", help=tasks)
    _add_place(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    official = "folder of official files (default: real data comes from the Hugging Face Hub)"
    add("--data", type=path, metavar="DIR", help=official)
    kept = f"where what is made once is kept (default: {Place().cache})"
    add("--cache", type=output_path, metavar="DIR", help=kept)
    generate = "processes that generate rows (default: 1)"
    add("--workers", type=whole(numbers.WORKERS), default=1, help=generate)


def _add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="train and test one model",
        description="Trains a model on a task and tests the one of the best validation, once. What "
        "is left out is the task's in the paper. OUT/cells gets one JSON; a finished one is kept.",
    )
    add = parser.add_argument
    tasks, mixers = ", ".join(TASKS.names()), ", ".join((*VARIANTS, *registry.names()))
    add("--task", required=True, help=f"{tasks}; options as listops:max_length=200")
    add("--mixer", required=True, help=f"{mixers}; options as las:chunk=128,position=none")
    add("--out", type=output_path, required=True, metavar="DIR", help="folder for the results")
    add(
        "--direction",
        choices=("causal", "both"),
        default="causal",
        help="causal models, as all of the paper's, or encoders that read both sides "
        "(default: causal)",
    )
    # What is left out is the task's: only options that were given reach the cell.
    add_options(parser, Cell, defaults=dict.fromkeys(recipe_of(""), argparse.SUPPRESS))
    add("--shuffle-labels", action="store_true", help="a control: train with other rows' labels")
    add("--device", default="auto", help="device: auto, cpu, cuda, cuda:1, …")
    _add_place(parser)
    parser.set_defaults(run=_run)


def _task_and_place(arguments: argparse.Namespace) -> tuple[Task, Place]:
    task = make_task(arguments.task)
    check_read(arguments.data, [task])
    place = Place(arguments.data, arguments.cache or Place().cache, arguments.workers)
    announce(f"{arguments.task}: data in {place.cache}")
    return task, place


def _prepare(arguments: argparse.Namespace) -> None:
    task, place = _task_and_place(arguments)
    for split in SPLITS:
        examples = task.load(split, place)
        print(_counted(task, split, examples))
    for name, value in examples.origin.items():
        print(f"{name}: {value}")
    for note in task.notes:
        print(f"note: {note}")


def _counted(task: Task, split: str, examples: Examples) -> str:
    """Return one line with a split's number of rows, beside the paper's."""
    lengths, parts = examples.lengths, [task.counted(split, len(examples))]
    if len(examples):
        parts.append(f"length {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}")
    if examples.labels is not None:
        shares = np.bincount(examples.labels, minlength=task.classes) / max(len(examples), 1)
        parts.append("classes " + " ".join(f"{share:.3f}" for share in shares))
    return "; ".join(parts)


def _show(arguments: argparse.Namespace) -> None:
    task, place = _task_and_place(arguments)
    examples = task.load(arguments.split, place)
    for row in range(min(arguments.rows, len(examples))):
        batch = examples.batch(np.array([row]))
        lengths = " and ".join(f"{length:,}" for length in np.atleast_1d(batch.lengths[0]))
        if task.classes:
            print(f"row {row}: label {batch.labels[0]}, length {lengths}")
        else:
            print(f"row {row}: length {lengths}, the last {task.scored:,} positions are scored")
            print("values: " + " ".join(f"{value:.3f}" for value in batch.labels[0]))
        for tower in batch.inputs[0] if task.towers > 1 else batch.inputs:
            print(task.shown(tower, examples.origin))


def make_cell(arguments: argparse.Namespace) -> Cell:
    """Build the cell of `run`'s options; omitted ones have the paper's values for the task."""
    task, place = _task_and_place(arguments)
    values = vars(arguments)
    if "pool" in values and task.scored:
        raise UserError(f"--pool: has no effect on {task.name}, which has no classes; leave it out")
    options = {name: values.get(name, value) for name, value in recipe_of(task.name).items()}
    for name in ("task", "seed", "eval_steps", "train_rows", "validation_rows", "test_rows"):
        options[name] = values[name]
    return Cell(
        mixer=fitted(arguments.mixer, task.name),
        is_causal=arguments.direction == "causal",
        is_shuffled=arguments.shuffle_labels,
        place=place,
        **options,
    )


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments.out)
    cell = make_cell(arguments)
    check_origins([cell], arguments.out)
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
