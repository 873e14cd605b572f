"""Keep finished tasks, and write and show the results of all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from lm_eval.utils import handle_non_serializable

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write, write_json, write_text
from cat_lm.core.readers import Versioned
from eval.common.result_files import TaskValues, ZeroShot, read_result
from eval.common.text_table import align_columns
from eval.lab.store import CellStore, key_hash

RESULT, TABLE = "zero_shot.json", "zero_shot.csv"
COLUMNS = ("task", "metric", "value", "stderr", "n", "version")
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


class _Cell(TaskValues, Versioned):
    """The file of a finished task."""


class Place:
    """The files of a task in OUT, whose name hashes all that its numbers depend on."""

    def __init__(self, out: Path, name: str, key: dict[str, Any]) -> None:
        self.name, self.key = name, key
        self._store, self._cell = CellStore(out / "tasks", _Cell), f"{name}-{key_hash(key)}"
        self._samples = out / "samples" / f"{self._cell}.jsonl"

    def read(self, samples: bool) -> dict[str, Any] | None:
        """Return the values of a finished task; None if it has to be computed.

        Args:
            samples: whether its prompts and answers are wanted too.
        """
        if samples and not self._samples.is_file():
            return None
        values = self._store.read_intact(self._cell, lambda values: values["key"] == self.key)
        if values is not None:
            where = self._store.path(self._cell)
            line = f"{self.name}: finished before, read from {where} ({describe_counts(values)})"
            print(line, file=sys.stderr)
        return values

    def write(self, values: dict[str, Any], samples: Sequence[Mapping[str, Any]] | None) -> None:
        """Write a task's values, and its prompts and answers if there are any."""
        if samples is not None:
            with atomic_write(self._samples) as file:
                for sample in sorted(samples, key=lambda row: (row["filter"], row["doc_id"])):
                    line = json.dumps(sample, default=handle_non_serializable, ensure_ascii=False)
                    file.write(line + "\n")
        self._store.write(self._cell, values)


def describe_counts(values: Mapping[str, Any]) -> str:
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

    Raises:
        UserError: they were computed with others; one file holds one model's numbers.
    """
    path = out / RESULT
    tasks = read_result(path, ZeroShot, "move it away, or give another --out").get("tasks", {})
    for values in tasks.values():
        for key, label in SHARED.items():
            before, now = values["key"].get(key), shared.get(key)
            if before != now:
                raise UserError(
                    f"{path}: has results with {label} {_short(before)}, this call has "
                    f"{_short(now)}; use another --out"
                )
    return tasks


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    """Write the result of all tasks as JSON and as a table."""
    write_json(out / RESULT, result)
    frame = pd.DataFrame(_lines(result, "acc"), columns=COLUMNS, dtype=object)
    write_text(out / TABLE, frame.to_csv(index=False))


def table(result: Mapping[str, Any]) -> str:
    """Return the values as aligned text, a line for each task and metric, then the average."""
    lines = [
        (task, metric, number(value), "" if error is None else f"± {number(error)}", str(n), str(v))
        for task, metric, value, error, n, v in _lines(result, "of 7 accuracies")
    ]
    return align_columns(
        ("task", "metric", "value", "± stderr", "rows", "version"), lines, (0, 1, 3)
    )


def _lines(result: Mapping[str, Any], of_average: str) -> Iterator[tuple[Any, ...]]:
    for name, task in result["tasks"].items():
        for metric, value in task["metrics"].items():
            error = task["stderr"].get(metric)
            yield name, metric, value, error, task["n"], task["version"]
    average = result["average"]
    if average["value"] is not None:
        yield "average", of_average, average["value"], average["stderr"], "", ""


def number(value: float | None) -> str:
    """Show a metric."""
    if value is None:
        return "n/a"
    if abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"
