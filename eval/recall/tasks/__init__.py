"""The synthetic tasks by name. A task is a frozen set of options with a generator of rows."""

from __future__ import annotations

from collections.abc import Mapping

from cat_lm.core.registry import Registry
from eval.lab.tasks import NamedTask
from eval.recall.tasks.base import Examples, Task, generate
from eval.recall.tasks.copying import SelectiveCopying
from eval.recall.tasks.multi_query import MultiQueryRecall
from eval.recall.tasks.needle import NeedleRecall
from eval.recall.tasks.single_query import SingleQueryRecall

__all__ = ["TASKS", "Examples", "Task", "generate", "make_task"]

_TASKS = (
    NamedTask("ar", SingleQueryRecall, {"ngram": 1}),
    NamedTask("nar", SingleQueryRecall, defaults={"ngram": 2}),
    NamedTask("mqar", MultiQueryRecall, {"ngram": 1, "pool": None}),
    NamedTask("mqnar", MultiQueryRecall, {"pool": None}, {"ngram": 2}),
    NamedTask("hard-mqnar", MultiQueryRecall, defaults={"ngram": 2, "pool": "auto"}),
    NamedTask("needle", NeedleRecall),
    NamedTask("selective-copy", SelectiveCopying),
)
TASKS: Registry[NamedTask] = Registry("--task", NamedTask, entries=_TASKS)


def make_task(name: str, seq_len: int, options: Mapping[str, str] | None = None) -> Task:
    """Make the task `name` at a length, with options given as text.

    Raises:
        UserError: an unknown name or option, or options that do not fit together.
    """
    return TASKS.get(name).make(options or {}, {"seq_len": seq_len})
