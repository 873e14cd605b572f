"""Show the paper's Table 2 with runs of one's own above the paper's rows.

The best and the second best value of each column are marked as in the paper, bold and underlined,
among the runs and among the paper's rows apart: they were not trained alike. A column with a
single value marks nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.files import atomic_write
from cat_lm.core.readers import Record, check_shape, read_object
from eval.common.text_table import markdown_table
from eval.zero_shot.tasks import table2

if TYPE_CHECKING:
    from eval.common.runs import Run

PAPER = Path(__file__).with_name("paper_table2.json")
AVERAGE = "average"
COLUMNS = (*table2.COLUMNS, AVERAGE)
HEADS = {
    "wikitext_ppl": ("Wikitext", "word ppl\u00a0↓"),
    "lambada_standard_ppl": ("LAMBADA standard", "ppl\u00a0↓"),
    "lambada_openai_ppl": ("LAMBADA OpenAI", "ppl\u00a0↓"),
    "lambada_standard_acc": ("LAMBADA standard", "acc\u00a0↑"),
    "lambada_openai_acc": ("LAMBADA OpenAI", "acc\u00a0↑"),
    "piqa": ("PIQA", "acc\u00a0↑"),
    "hellaswag": ("HellaSwag", "acc_norm\u00a0↑"),
    "winogrande": ("WinoGrande", "acc\u00a0↑"),
    "arc_easy": ("ARC-Easy", "acc\u00a0↑"),
    "arc_challenge": ("ARC-Challenge", "acc_norm\u00a0↑"),
    AVERAGE: ("average", "of 7 acc\u00a0↑"),
}
OURS, THEIRS = "this report", "paper"


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        source: OURS or THEIRS.
        values: column -> value; None where there is none.
        errors: column -> standard error, where it is known.
        limit: rows of each task that were used, where not all of them.
        context, dtype: the longest text that is read at once, in tokens, and the arithmetic's
            dtype, where known.
        tasks: task -> digests of its rows and definition.
        copied: a row that the paper took from elsewhere.
    """

    model: str
    source: str
    values: dict[str, float | None]
    errors: dict[str, float | None] = field(default_factory=dict)
    limit: int | None = None
    context: int | None = None
    dtype: str | None = None
    tasks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    copied: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}*" if self.copied else self.model


def own_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for every run; all its values are None where eval.zero_shot was not run."""
    rows = []
    for run in runs:
        tasks = run.zero_shot.get("tasks", {})
        errors = {
            column: tasks.get(task, {}).get("stderr", {}).get(metric)
            for column, (task, metric) in table2.COLUMNS.items()
        }
        average = table2.average(tasks)
        model = run.zero_shot.get("model", {})
        rows.append(
            Row(
                run.label,
                OURS,
                table2.columns(tasks) | {AVERAGE: average["value"]},
                errors | {AVERAGE: average["stderr"]},
                limit=run.zero_shot.get("settings", {}).get("limit"),
                context=model.get("max_length"),
                dtype=model.get("dtype"),
                tasks=_what_was_asked(tasks),
            )
        )
    return rows


def _what_was_asked(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    digests = ("rows_sha256", "definition_sha256")
    return {task: tuple(values["key"][name] for name in digests) for task, values in tasks.items()}


def paper_rows() -> list[Row]:
    """The rows as printed."""
    printed = read_object(PAPER)
    check_shape(printed, _Paper, str(PAPER))
    rows = []
    for number, row in enumerate(printed["rows"], 1):
        place = f"{PAPER}, row {number}"
        about = check_shape(row, _PaperRow, place)
        values = {column: row.get(column) for column in COLUMNS}
        check_shape({"values": values}, _PaperValues, place)
        rows.append(Row(about.model, THEIRS, values, copied=not about.trained_by_the_paper))
    return rows


class _Paper(Record):
    rows: list[Any]


class _PaperRow(Record):
    model: str
    trained_by_the_paper: bool


class _PaperValues(Record):
    values: dict[str, float | None]


def marks(rows: Sequence[Row]) -> dict[tuple[int, str], str]:
    """(row, column) -> "best" or "second"; equal values share a mark."""
    found = {}
    for column in COLUMNS:
        values = sorted({row.values[column] for row in rows if row.values[column] is not None})
        if not column.endswith("_ppl"):
            values.reverse()
        if len([row for row in rows if row.values[column] is not None]) < 2:
            continue
        for index, row in enumerate(rows):
            for mark, value in zip(("best", "second"), values, strict=False):
                if row.values[column] == value:
                    found[index, column] = mark
    return found


def shown(column: str, value: float | None) -> str:
    """As many digits as the paper prints; an accuracy as a fraction."""
    if value is None:
        return "–"
    return f"{value:,.3f}" if value < 1000 or not column.endswith("_ppl") else f"{value:,.0f}"


def markdown(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """Runs above, the paper's rows below, with a word in every row on whose it is."""
    head = ["model", "from", *(" ".join(HEADS[column]) for column in COLUMNS)]
    lines = []
    for rows in (ours, theirs):
        marked = marks(rows)
        for index, row in enumerate(rows):
            cells = []
            for column in COLUMNS:
                text = shown(column, row.values[column])
                mark = marked.get((index, column))
                cells.append({"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(mark, text))
            lines.append([row.name, row.source, *cells])
    warning = f"**{warnings(ours)}**" if warnings(ours) else ""
    parts = (markdown_table(head, lines), warning, NOTE)
    return "\n\n".join(part for part in parts if part) + "\n"


def warnings(rows: Sequence[Row]) -> str:
    """Return which rows were not measured on whole tasks, or not as the others; empty if none."""
    said = []
    if limits := _models_by(rows, "limit"):
        parts = [f"the first {n:,} rows ({', '.join(names)})" for n, names in limits.items()]
        said.append(f"Not whole tasks, by --limit: only {'; '.join(parts)} of each.")
    if len(contexts := _models_by(rows, "context")) > 1:
        parts = [f"{n:,} tokens ({', '.join(names)})" for n, names in contexts.items()]
        said.append(f"Not at one length, by --max-length: {'; '.join(parts)}.")
    if len(dtypes := _models_by(rows, "dtype")) > 1:
        parts = [f"{dtype} ({', '.join(names)})" for dtype, names in dtypes.items()]
        said.append(f"Not in one arithmetic, by --dtype: {'; '.join(parts)}.")
    asked: dict[str, set[tuple[str, ...]]] = {}
    for task, digests in (item for row in rows for item in row.tasks.items()):
        asked.setdefault(task, set()).add(digests)
    if unlike := sorted(task for task, found in asked.items() if len(found) > 1):
        said.append(f"Not of the same rows, or by another definition: {', '.join(unlike)}.")
    return " ".join(said)


def _models_by(rows: Sequence[Row], attribute: str) -> dict[Any, list[str]]:
    """Gather names of models by a value, where they have one; values in order."""
    models: dict[Any, list[str]] = {}
    for row in rows:
        if value := getattr(row, attribute):
            models.setdefault(value, []).append(row.model)
    return dict(sorted(models.items()))


NOTE = (
    "Bold: best, underlined: second best, among the runs of this report and among the paper's rows "
    "apart. Paper: Li et al., On the Power of Convolution Augmented Transformer, Table 2: models "
    "of 370M parameters after 15B tokens of SlimPajama, not measured here; *: rows that the paper "
    "takes from Yang et al. (2023)."
)


def groups(ours: Sequence[Row], theirs: Sequence[Row]) -> list[dict[str, Any]]:
    """Gather what the page's table shows: the runs, and below them the paper's rows."""
    return [
        {"title": title, "ours": rows is ours, "rows": _shown_rows(rows)}
        for title, rows in (
            ("Runs of this report", ours),
            ("Printed in the paper, not measured here", theirs),
        )
    ]


def _shown_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    marked = marks(rows)
    return [
        {
            "name": row.name,
            "cells": [
                {
                    "text": shown(column, row.values[column]),
                    "error": "" if error is None else shown(column, error),
                    "mark": marked.get((index, column), ""),
                }
                for column in COLUMNS
                for error in (row.errors.get(column),)
            ],
        }
        for index, row in enumerate(rows)
    ]


def write_csv(path: Path, ours: Sequence[Row], theirs: Sequence[Row]) -> None:
    """All digits; `source` says whose a row is."""
    with atomic_write(path) as file:
        writer = csv.writer(file)
        errors = [f"{column}_stderr" for column in COLUMNS]
        writer.writerow(["model", "source", "limit", "context", "dtype", *COLUMNS, *errors])
        for row in (*ours, *theirs):
            values = [row.values[column] for column in COLUMNS]
            values += [row.errors.get(column) for column in COLUMNS]
            how = (row.limit, row.context, row.dtype)
            writer.writerow([row.model, row.source, *how, *values])
