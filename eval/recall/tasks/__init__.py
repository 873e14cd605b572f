"""The synthetic tasks by name. A task is a frozen set of options with a generator of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.options import build_options
from eval.recall.tasks.base import Examples, Task, generate
from eval.recall.tasks.copying import SelectiveCopying
from eval.recall.tasks.multi_query import MultiQueryRecall
from eval.recall.tasks.needle import NeedleRecall
from eval.recall.tasks.single_query import SingleQueryRecall

__all__ = ["TASKS", "Examples", "Task", "generate", "make_task"]

# name -> (class, options that the name fixes)
TASKS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "ar": (SingleQueryRecall, {"ngram": 1}),
    "nar": (SingleQueryRecall, {}),
    "mqar": (MultiQueryRecall, {"ngram": 1, "pool": None}),
    "mqnar": (MultiQueryRecall, {"pool": None}),
    "hard-mqnar": (MultiQueryRecall, {}),
    "needle": (NeedleRecall, {}),
    "selective-copy": (SelectiveCopying, {}),
}
# Defaults of a name that differ from its class's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "nar": {"ngram": 2},
    "mqnar": {"ngram": 2},
    "hard-mqnar": {"ngram": 2, "pool": "auto"},
}


def make_task(name: str, seq_len: int, options: Mapping[str, str] | None = None) -> Task:
    """The task `name` at a length, with options given as text.

    Raises:
        UserError: an unknown name or option, or options that do not fit together.
    """
    if name not in TASKS:
        raise UserError(f"--task {name!r}: choose one of {', '.join(TASKS)}")
    cls, fixed = TASKS[name]
    defaults = {**_DEFAULTS.get(name, {}), **fixed, "seq_len": seq_len}
    return build_options(cls, f"task {name}", options or {}, defaults, (*fixed, "seq_len"))
