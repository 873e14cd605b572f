"""The files of zero-shot results: what is kept of finished tasks, and the table for people."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.utils import handle_non_serializable

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write, write_json
from cat_lm.core.readers import Record, Versioned, check_shape, read_object
from eval.common.text_table import aligned
from eval.lab.store import CellStore, key_hash
from eval.zero_shot.tasks.sources import needed_splits

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

RESULT, TABLE = "zero_shot.json", "zero_shot.csv"
# Keys that the tasks of one result file share, with their names on the command line.
SHARED = {
    "model_sha256": "the model",
    "tokenizer_sha256": "the tokenizer",
    "dtype": "--dtype",
    "max_length": "--max-length",
    "limit": "--limit",
    "bootstrap_iterations": "--bootstrap-iterations",
    "harness": "lm_eval",
    "plugins": "the plugins",
}


class _Values(Record):
    """A finished task's values."""

    metrics: dict[str, float | None]
    stderr: dict[str, float | None]
    version: Any
    n: int
    rows: int
    num_fewshot: int
    higher_is_better: dict[str, Any]
    truncated: int
    batch_size: int
    seconds: float
    tokens_per_second: float
    key: dict[str, Any]
    left_out: dict[str, int]
    requests: int


class _Cell(_Values, Versioned):
    """The file of a finished task."""


class _Result(Versioned):
    """The file of all tasks."""

    tasks: dict[str, _Values]


def cell_name(name: str, key: Mapping[str, Any]) -> str:
    """Name a task's cell: TASK-HASH."""
    return f"{name}-{key_hash(key)}"


def task_store(out: Path) -> CellStore:
    """Open the store of finished tasks."""
    return CellStore(out / "tasks", _Cell)


def samples_file(out: Path, name: str, key: Mapping[str, Any]) -> Path:
    """Name the file of a task's prompts and answers."""
    return out / "samples" / f"{cell_name(name, key)}.jsonl"


def finished(out: Path, name: str, key: Mapping[str, Any], samples: bool) -> dict[str, Any] | None:
    """Read the values of a finished task; None where it has to be computed (again)."""
    store, cell = task_store(out), cell_name(name, key)
    if samples and not samples_file(out, name, key).is_file():
        return None
    values = store.read_intact(cell, lambda values: values["key"] == key)
    if values is not None:
        told = f"finished before, read from {store.path(cell)} ({counted(values)})"
        print(f"{name}: {told}", file=sys.stderr)
    return values


def left_out(task: ConfigurableTask, rows: int, scored: int, limit: int | None) -> dict[str, int]:
    """Rows of the split that were not scored, by the reason for it.

    Args:
        rows: that the definition makes of the split's.
        scored: those of them that have answers of the model.

    Raises:
        RuntimeError: the harness has scored other rows than it was asked to.
    """
    asked = min(rows, limit or rows)
    if scored != asked:
        raise RuntimeError(f"task {task.config.task}: {scored} of {asked} rows were scored")
    there = len(task.dataset[needed_splits(task.config)[0]])
    return {"by_limit": rows - scored, "by_definition": there - rows}


def counted(values: Mapping[str, Any]) -> str:
    """Return what was scored of a task and what was left out."""
    parts = [f"{values['n']} of {values['rows']} rows scored"]
    for reason, rows in values["left_out"].items():
        if rows:
            which = "by --limit" if reason == "by_limit" else "by the task's definition"
            parts.append(f"{rows} left out {which}")
    if values["truncated"]:
        asked = f"{values['truncated']} of {values['requests']} requests"
        parts.append(f"{asked} without the start of their context")
    return ", ".join(parts)


def earlier_tasks(out: Path, shared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tasks that OUT's result file has already, which a call adds to.

    Args:
        shared: the values of `SHARED` in this call.

    Raises UserError where they were computed with others: one file holds one model's numbers.
    """
    path, advice = out / RESULT, "move it away, or give another --out"
    if not path.is_file():
        return {}
    result = read_object(path, advice)
    check_shape(result, _Result, str(path), advice)
    for values in result["tasks"].values():
        for key, label in SHARED.items():
            before, now = values["key"].get(key), shared.get(key)
            if before != now:
                raise UserError(
                    f"{path}: has results with {label} {_short(before)}, this call has "
                    f"{_short(now)}; use another --out"
                )
    return result["tasks"]


def _short(value: Any) -> str:
    """A setting for people; of a hash its beginning."""
    text = "none" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    write_json(out / RESULT, result)
    with atomic_write(out / TABLE) as file:
        writer = csv.writer(file)
        writer.writerow(("task", "metric", "value", "stderr", "n", "version"))
        for name, task in result["tasks"].items():
            for metric, value in task["metrics"].items():
                error = task["stderr"].get(metric)
                writer.writerow((name, metric, value, error, task["n"], task["version"]))
        average = result["average"]
        if average["value"] is not None:
            writer.writerow(("average", "acc", average["value"], average["stderr"], "", ""))


def write_samples(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    with atomic_write(path) as file:
        for sample in sorted(samples, key=lambda row: (row["filter"], row["doc_id"])):
            line = json.dumps(sample, default=handle_non_serializable, ensure_ascii=False)
            file.write(line + "\n")


def table(result: Mapping[str, Any]) -> str:
    """The values as aligned text, a line per task and metric, then the average."""
    rows = [("task", "metric", "value", "± stderr", "rows", "version")]
    for name, task in result["tasks"].items():
        for metric, value in task["metrics"].items():
            error = task["stderr"].get(metric)
            text = "" if error is None else f"± {number(error)}"
            rows.append((name, metric, number(value), text, str(task["n"]), str(task["version"])))
    average = result["average"]
    if average["value"] is not None:
        error = "" if average["stderr"] is None else f"± {number(average['stderr'])}"
        rows.append(("average", "of 7 accuracies", number(average["value"]), error, "", ""))
    return aligned(rows[0], rows[1:], left=(0, 1, 3))


def number(value: float | None) -> str:
    if value is None:
        return "n/a"
    if abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"
