"""Show the paper's Table 2 with runs of one's own above the paper's rows.

The best and the second best value of each column are marked as in the paper, bold and underlined,
among the runs and among the paper's rows apart: they were not trained alike. A column with a
single value marks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.readers import read_object
from eval.common.text_table import markdown_table
from eval.zero_shot.tasks import table2

if TYPE_CHECKING:
    import pandas as pd

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
# What rows must share to be compared: attribute, number of values from which a warning is due, the
# warning, and how it shows a value.
ALIKE = (
    ("limit", 1, "Not whole tasks, by --limit: only {} of each.", "the first {:,} rows"),
    ("context", 2, "Not at one length, by --max-length: {}.", "{:,} tokens"),
    ("dtype", 2, "Not in one arithmetic, by --dtype: {}.", "{}"),
)
NOTE = (
    "Bold: best, underlined: second best, among the runs of this report and among the paper's rows "
    "apart. Paper: Li et al., On the Power of Convolution Augmented Transformer, Table 2: models "
    "of 370M parameters after 15B tokens of SlimPajama, not measured here; *: rows that the paper "
    "takes from Yang et al. (2023)."
)


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


def own_rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for every run; its values are None where eval.zero_shot was not run."""
    digests = ("rows_sha256", "definition_sha256")
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
                tasks={
                    task: tuple(v["key"][name] for name in digests) for task, v in tasks.items()
                },
            )
        )
    return rows


def paper_rows() -> list[Row]:
    """Return the rows as printed."""
    rows = []
    for row in read_object(PAPER)["rows"]:
        values = {column: row.get(column) for column in COLUMNS}
        rows.append(Row(row["model"], THEIRS, values, copied=not row["trained_by_the_paper"]))
    return rows


def marks(rows: Sequence[Row]) -> dict[tuple[int, str], str]:
    """Map (row, column) to "best" or "second"; equal values share a mark."""
    found = {}
    for column in COLUMNS:
        known = {
            n: row.values[column] for n, row in enumerate(rows) if row.values[column] is not None
        }
        values = sorted(set(known.values()))
        if not column.endswith("_ppl"):
            values.reverse()
        if len(known) < 2:
            continue
        for index, value in known.items():
            if value in values[:2]:
                found[index, column] = ("best", "second")[values.index(value)]
    return found


def _shown(column: str, value: float | None) -> str:
    """Show as many digits as the paper prints; an accuracy as a fraction."""
    if value is None:
        return "–"
    return f"{value:,.3f}" if value < 1000 or not column.endswith("_ppl") else f"{value:,.0f}"


def groups(ours: Sequence[Row], theirs: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what a table shows: the runs, and below them the paper's rows."""
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
            "name": f"{row.model}*" if row.copied else row.model,
            "source": row.source,
            "cells": [
                {
                    "text": _shown(column, row.values[column]),
                    "error": "" if error is None else _shown(column, error),
                    "mark": marked.get((index, column), ""),
                }
                for column in COLUMNS
                for error in (row.errors.get(column),)
            ],
        }
        for index, row in enumerate(rows)
    ]


def markdown(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """Lay the table out in Markdown, with a word in every row on whose it is."""
    head = ["model", "from", *(" ".join(HEADS[column]) for column in COLUMNS)]
    style = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    lines = [
        [row["name"], row["source"], *(style[x["mark"]].format(x["text"]) for x in row["cells"])]
        for group in groups(ours, theirs)
        for row in group["rows"]
    ]
    warning = f"**{warnings(ours)}**" if warnings(ours) else ""
    parts = (markdown_table(head, lines), warning, NOTE)
    return "\n\n".join(part for part in parts if part) + "\n"


def warnings(rows: Sequence[Row]) -> str:
    """Return which rows were not measured on whole tasks, or not as the others; empty if none."""
    said = []
    for attribute, due, sentence, show in ALIKE:
        models: dict[Any, list[str]] = {}
        for row in rows:
            if value := getattr(row, attribute):
                models.setdefault(value, []).append(row.model)
        if len(models) >= due:
            parts = [
                f"{show.format(v)} ({', '.join(names)})" for v, names in sorted(models.items())
            ]
            said.append(sentence.format("; ".join(parts)))
    asked: dict[str, set[tuple[str, ...]]] = {}
    for task, digests in (item for row in rows for item in row.tasks.items()):
        asked.setdefault(task, set()).add(digests)
    if unlike := sorted(task for task, found in asked.items() if len(found) > 1):
        said.append(f"Not of the same rows, or by another definition: {', '.join(unlike)}.")
    return " ".join(said)


def frame(ours: Sequence[Row], theirs: Sequence[Row]) -> pd.DataFrame:
    """Return the table with all digits; `source` says whose a row is."""
    import pandas as pd

    about = ("model", "source", "limit", "context", "dtype")
    rows = [
        {name: getattr(row, name) for name in about}
        | {column: row.values[column] for column in COLUMNS}
        | {f"{column}_stderr": row.errors.get(column) for column in COLUMNS}
        for row in (*ours, *theirs)
    ]
    return pd.DataFrame(rows, dtype=object)
