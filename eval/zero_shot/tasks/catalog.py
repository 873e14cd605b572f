"""Find the harness's task objects by the names on the command line."""

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
from lm_eval.tasks._yaml_loader import load_yaml

from cat_lm.core.errors import UserError
from eval.zero_shot.tasks import table2
from eval.zero_shot.tasks.harness import first_line
from eval.zero_shot.tasks.sources import sourced_task

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

    Raises:
        UserError: an unknown name, with the nearest known ones, or a folder that cannot be used.
    """

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        wanted = [
            task for name in names for task in (table2.TASKS if name == "table2" else (name,))
        ]
        self._manager = _manager(wanted, include)
        specs = [spec for name in wanted for spec in self._leaves(name, {})]
        self.specs: dict[str, dict[str, Any]] = {spec["task"]: spec for spec in specs}

    def load(self, name: str, source: Source) -> ConfigurableTask:
        """Return the harness's task with its rows from `source`. Raises UserError for bad rows."""
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
                f"harness's definition reads ({type(error).__name__}: {first_line(error)})"
            ) from error
        return loaded["tasks"][name]

    def _leaves(self, item: str | Mapping[str, Any], changes: Mapping) -> list[dict[str, Any]]:
        if isinstance(item, Mapping):
            changes = {**changes, **{k: v for k, v in item.items() if k not in ("task", "group")}}
            item = item.get("task") or item.get("group")
        entry = self._manager.task_index.get(item)
        if entry is None:
            near = difflib.get_close_matches(item, [*self._manager.all_tasks, "table2"])
            known = "known are table2 and the names that `lm_eval ls tasks` prints"
            hint = f"did you mean {', '.join(near)}?" if near else known
            raise UserError(f"--tasks {item}: unknown; {hint}")
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
    folders = [root / name for name in _TABLE2_FOLDERS]
    if include is not None:
        _check_definitions(include)
        folders.append(include := include.absolute())
    few = TaskManager(include_defaults=False, include_path=folders)
    entries = [few.task_index.get(name) for name in wanted]
    for name in table2.TASKS:
        place = few.task_index[name].yaml_path
        if place is not None and not place.is_relative_to(root):
            raise UserError(f"--include-path: {place} defines {name}, a task of table2; rename it")
    # A group or tag may have tasks in other folders too.
    known = all(entry is not None and entry.kind.name == "TASK" for entry in entries)
    return few if known else _whole_manager(include)


def _check_definitions(folder: Path) -> None:
    """Raise UserError for YAML that cannot be read, which the harness passes over."""
    if not folder.is_dir():
        raise UserError(f"--include-path {folder}: no such folder")
    for path in sorted(folder.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # YAML, the file system or an `include` may raise.
            reason = " ".join(str(error).split())
            raise UserError(f"--include-path: {path}: is no definition: {reason}") from None


@functools.cache
def _whole_manager(include: Path | None) -> TaskManager:
    return TaskManager(include_path=include)
