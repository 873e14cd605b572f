"""`prepare` and `show`: make a task's data, count it, and look at rows as a model reads them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from cat_lm.core import numbers
from cat_lm.core.cli import output_path, path, whole
from cat_lm.core.errors import UserError
from eval.long_range.tasks import SPLITS, TASKS, Examples, Place, Task, make_task

_SHOWN = numbers.Range(1, 1_000)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where data lies; `place_of` reads them."""
    add = parser.add_argument
    official = "folder of official files (default: real data comes from the Hugging Face Hub)"
    add("--data", type=path, metavar="DIR", help=official)
    kept = f"where what is made once is kept (default: {Place().cache})"
    add("--cache", type=output_path, metavar="DIR", help=kept)


def place_of(arguments: argparse.Namespace, workers: int, *tasks: Task) -> Place:
    """Return the place that the options of `add_place` name.

    Raises:
        UserError: --data, which none of these tasks reads.
    """
    if arguments.data is not None:
        check_read(tasks)
    return Place(arguments.data, arguments.cache or Place().cache, workers)


def check_read(tasks: Sequence[Task]) -> None:
    """Raise UserError where --data is given and each of these tasks is generated."""
    if tasks and not any(task.reads_files for task in tasks):
        names = ", ".join(dict.fromkeys(task.name for task in tasks))
        raise UserError(f"--data: has no effect on {names}, made by a generator; leave it out")


def add_prepare(commands: argparse._SubParsersAction) -> None:
    """Add the command that makes a task's data and counts it."""
    parser = commands.add_parser(
        "prepare",
        help="make a task's data, or read its files, and count it",
        description="Makes what a task needs, once, in the cache, and says how many rows of which "
        "classes and lengths there are, and what they come from. Training does the same where it "
        "was not done before.",
    )
    _add_task(parser)
    parser.set_defaults(run=_prepare)


def add_show(commands: argparse._SubParsersAction) -> None:
    """Add the command that shows rows."""
    parser = commands.add_parser(
        "show",
        help="show rows of a task as a model reads them",
        description="Prints rows of a task: texts and ListOps as text, images as characters, "
        "numbers as numbers; each with its label and length.",
    )
    _add_task(parser)
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--rows", type=whole(_SHOWN), default=3, help="rows to show (default: 3)")
    parser.set_defaults(run=_show)


def _add_task(parser: argparse.ArgumentParser) -> None:
    tasks = f"{', '.join(TASKS.names())}; options as listops:max_length=200,train=1000"
    parser.add_argument("task", metavar="TASK", help=tasks)
    workers = "processes that generate (default: 1)"
    parser.add_argument("--workers", type=whole(numbers.WORKERS), default=1, help=workers)
    add_place(parser)


def _prepare(arguments: argparse.Namespace) -> None:
    task = make_task(arguments.task)
    place = place_of(arguments, arguments.workers, task)
    for split in SPLITS:
        examples = task.load(split, place)
        print(_counted(task, split, examples))
    for name, value in examples.origin.items():
        print(f"{name}: {value}")
    for note in task.notes:
        print(f"note: {note}")


def _counted(task: Task, split: str, examples: Examples) -> str:
    """Describe in a line what a split has, and how many rows the paper's data has."""
    lengths = examples.lengths()
    parts = [task.counted(split, len(examples))]
    if len(examples):
        parts.append(f"length {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}")
    if examples.labels is not None:
        shares = np.bincount(examples.labels, minlength=task.classes) / max(len(examples), 1)
        parts.append("classes " + " ".join(f"{share:.3f}" for share in shares))
    return "; ".join(parts)


def _show(arguments: argparse.Namespace) -> None:
    task = make_task(arguments.task)
    examples = task.load(arguments.split, place_of(arguments, arguments.workers, task))
    for row in range(min(arguments.rows, len(examples))):
        batch = examples.batch(np.array([row]))
        lengths = " and ".join(f"{length:,}" for length in np.atleast_1d(batch.lengths[0]))
        if task.classes:
            print(f"row {row}: label {batch.labels[0]}, length {lengths}")
        else:
            print(f"row {row}: length {lengths}, the last {task.scored:,} positions are scored")
            print(f"values: {_numbers(batch.labels[0])}")
        towers = batch.inputs[0] if task.towers > 1 else batch.inputs
        for tower in towers:
            print(task.shown(tower, examples.origin))


def _numbers(values: np.ndarray) -> str:
    return " ".join(f"{value:.3f}" for value in values)
