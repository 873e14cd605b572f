"""From the names on the command line to the harness's task objects."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.tasks
from lm_eval.config.group import GroupConfig
from lm_eval.tasks import TaskManager

from cat_lm.core.errors import UserError
from eval.zero_shot.tasks import table2

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from eval.zero_shot.tasks.sources import Source

# Where the harness keeps the tasks of the table: reading all its 14,000 takes seconds.
_TABLE2_FOLDERS = ("arc", "hellaswag", "lambada", "piqa", "wikitext", "winogrande")
_GROUP_KEYS = {field.name for field in dataclasses.fields(GroupConfig)}


class Catalog:
    """The tasks that were asked for, with the harness's own definitions.

    `table2` stands for the tasks of the paper's table, the name of a harness group or tag for the
    tasks in it.

    Args:
        include: a folder of definitions in the harness's YAML form, besides its own.

    Attributes:
        specs: task name -> the definition's name and what its group changes in it.

    Raises UserError for unknown names, with the nearest known ones.
    """

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        wanted = [
            task for name in names for task in (table2.TASKS if name == "table2" else (name,))
        ]
        self._manager = _manager(wanted, include)
        self.specs: dict[str, dict[str, Any]] = {}
        for name in wanted:
            for spec in self._leaves(name, {}):
                self.specs[spec["task"]] = spec

    def load(self, name: str, source: Source) -> ConfigurableTask:
        """The harness's task with its rows from `source`. Raises UserError where they are bad."""
        from eval.zero_shot.tasks.sources import sourced_task

        spec = self.specs[name] | {"class": sourced_task(source)}
        try:
            # A group of one task: the harness's way to change single keys of a definition.
            loaded = self._manager.load([{"group": "zero_shot", "task": [spec]}])
        except UserError:
            raise
        except Exception as error:
            # Whatever prompts and metrics raise when they meet rows that they do not know.
            raise UserError(
                f"task {name}: {source.describe(name)}: rows are not in the columns that the "
                f"harness's definition reads ({type(error).__name__}: {_first_line(error)})"
            ) from error
        return loaded["tasks"][name]

    def _leaves(self, item: str | Mapping[str, Any], changes: Mapping) -> list[dict[str, Any]]:
        if isinstance(item, Mapping):
            changes = {**changes, **{k: v for k, v in item.items() if k not in ("task", "group")}}
            item = item.get("task") or item.get("group")
        entry = self._manager.task_index.get(item)
        if entry is None:
            raise UserError(f"--tasks {item}: unknown{_suggestion(item, self._manager)}")
        match entry.kind.name:
            case "TAG":
                children = sorted(entry.tags)
            case "GROUP":
                children = entry.cfg["task"]
                children = [children] if isinstance(children, str) else children
                own = {k: v for k, v in entry.cfg.items() if k not in _GROUP_KEYS}
                changes = {**own, **changes}
            case "TASK":
                return [{**changes, "task": item}]
            case _:
                raise UserError(
                    f"--tasks {item}: the harness defines it in Python, not in YAML; "
                    "run it with lm_eval itself"
                )
        return [spec for child in children for spec in self._leaves(child, changes)]


def _manager(wanted: Sequence[str], include: Path | None) -> TaskManager:
    root = Path(lm_eval.tasks.__file__).parent
    own = [] if include is None else [include]
    folders = [*(root / name for name in _TABLE2_FOLDERS), *own]
    few = TaskManager(include_defaults=False, include_path=folders)
    entries = [few.task_index.get(name) for name in wanted]
    for name in table2.TASKS:
        place = few.task_index[name].yaml_path
        if place is not None and not place.is_relative_to(root):
            raise UserError(f"--include-path: {place} defines {name}, a task of table2; rename it")
    # A group or tag may have tasks in other folders too.
    known = all(entry is not None and entry.kind.name == "TASK" for entry in entries)
    return few if known else _whole_manager(include)


@functools.cache
def _whole_manager(include: Path | None) -> TaskManager:
    return TaskManager(include_path=include)


def _suggestion(name: str, manager: TaskManager) -> str:
    near = difflib.get_close_matches(name, [*manager.all_tasks, "table2"], n=3, cutoff=0.6)
    if near:
        return f"; did you mean {', '.join(near)}?"
    return "; known are table2 and the names that `lm_eval ls tasks` prints"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
