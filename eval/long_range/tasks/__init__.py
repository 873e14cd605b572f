"""The tasks by name: a frozen set of options with facts for a model and rows to train it on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from cat_lm.core.registry import Registry
from eval.lab.tasks import NamedTask
from eval.long_range.tasks.atomic import CumMax, CumSum, Select
from eval.long_range.tasks.base import SPLITS, Batch, Examples, Place, Task
from eval.long_range.tasks.images import Cifar10, Pathfinder, PermutedMnist, SequentialMnist
from eval.long_range.tasks.listops import ListOps
from eval.long_range.tasks.texts import Imdb, Retrieval

__all__ = ["SPLITS", "TASKS", "Batch", "Examples", "Place", "Task", "check_read", "make_task"]

_TASKS = (
    *(ListOps, Imdb, Retrieval, Cifar10, Pathfinder),
    *(SequentialMnist, PermutedMnist),
    *(Select, CumSum, CumMax),
)
TASKS: Registry[NamedTask] = Registry(
    "task", NamedTask, entries=(NamedTask(task.name, task) for task in _TASKS)
)


def make_task(text: str) -> Task:
    """Make a task from `NAME` or `NAME:option=value,…`.

    Raises:
        UserError: an unknown name or option, or options that do not fit together.
    """
    name, options = parse_specification(text)
    return TASKS.get(name).make(options)


def check_read(folder: Path | None, tasks: Sequence[Task]) -> None:
    """Raise UserError where a folder of files is given and each of these tasks is generated."""
    if folder is not None and not any(task.reads_files for task in tasks):
        names = ", ".join(dict.fromkeys(task.name for task in tasks))
        raise UserError(f"--data: has no effect on {names}, made by a generator; leave it out")
