"""The tasks by name: a frozen set of options with facts for a model and rows to train it on."""

from __future__ import annotations

from cat_lm.core.fields import parse_specification
from cat_lm.core.registry import Registry
from eval.lab.tasks import NamedTask
from eval.long_range.tasks.atomic import CumMax, CumSum, Select
from eval.long_range.tasks.base import PAD, SPLITS, Batch, Examples, Exchanged, Place, Task
from eval.long_range.tasks.images import Cifar10, PermutedMnist, SequentialMnist
from eval.long_range.tasks.imdb import Imdb
from eval.long_range.tasks.listops import ListOps
from eval.long_range.tasks.pathfinder import Pathfinder
from eval.long_range.tasks.retrieval import Retrieval

__all__ = ["PAD", "SPLITS", "TASKS", "Batch", "Examples", "Exchanged", "Place", "Task", "make_task"]

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
