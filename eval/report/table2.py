"""Show the paper's Table 2 with runs of one's own above the paper's rows.

The best and the second best value of each column are marked as in the paper, bold and underlined,
among the runs and among the paper's rows apart: they were not trained alike. A column with a
single value marks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cat_lm.core.readers import read_object
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
ABOUT = ("model", "source", "limit", "context", "dtype")
# What rows must share to be compared: column, number of values from which a warning is due, the
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


def own_rows(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row for every run, with all digits; missing if eval.zero_shot was not run."""
    rows = []
    for run in runs:
        tasks, model = run.zero_shot.get("tasks", {}), run.zero_shot.get("model", {})
        average = table2.average(tasks)
        limit = run.zero_shot.get("settings", {}).get("limit")
        about = (run.label, OURS, limit, model.get("max_length"), model.get("dtype"))
        values = table2.columns(tasks) | {AVERAGE: average["value"]}
        errors = table2.columns(tasks, "stderr") | {AVERAGE: average["stderr"]}
        errors = {f"{column}_stderr": error for column, error in errors.items()}
        rows.append(dict(zip(ABOUT, about, strict=True)) | values | errors)
    return _frame(rows)


def paper_rows() -> pd.DataFrame:
    """Return the rows as printed; the model's name has a star where the paper copied it."""
    rows = []
    for row in read_object(PAPER)["rows"]:
        name = row["model"] if row["trained_by_the_paper"] else f"{row['model']}*"
        rows.append({column: row.get(column) for column in COLUMNS})
        rows[-1] |= {"model": name, "source": THEIRS}
    return _frame(rows)


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    columns = [*ABOUT, *COLUMNS, *(f"{column}_stderr" for column in COLUMNS)]
    return pd.DataFrame(rows, columns=columns, dtype=object)


def best_and_second(rows: pd.DataFrame) -> pd.DataFrame:
    """Return "best", "second" or "" for each value; equal values share a mark."""
    found = pd.DataFrame("", index=rows.index, columns=COLUMNS)
    for column in COLUMNS:
        values = rows[column].dropna().astype(float)
        if len(values) > 1:
            is_lower_better = column.endswith("_ppl")
            ranks = values.rank(method="dense", ascending=is_lower_better)
            found.loc[values.index, column] = ranks.map({1: "best", 2: "second"}).fillna("")
    return found


def _format_value(column: str, value: Any) -> str:
    """Show as many digits as the paper prints; an accuracy as a fraction."""
    if pd.isna(value):
        return "–"
    return f"{value:,.3f}" if value < 1000 or not column.endswith("_ppl") else f"{value:,.0f}"


def groups(ours: pd.DataFrame, theirs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what a table shows: the runs, and below them the paper's rows."""
    found = []
    for title, rows in (
        ("Runs of this report", ours),
        ("Printed in the paper, not measured here", theirs),
    ):
        marked, shown = best_and_second(rows), []
        for index, row in rows.iterrows():
            errors = {column: row[f"{column}_stderr"] for column in COLUMNS}
            cells = [
                {
                    "text": _format_value(column, row[column]),
                    "error": "" if pd.isna(error) else _format_value(column, error),
                    "mark": marked.loc[index, column],
                }
                for column, error in errors.items()
            ]
            shown.append({"name": row["model"], "source": row["source"], "cells": cells})
        found.append({"title": title, "ours": rows is ours, "rows": shown})
    return found


def markdown(ours: pd.DataFrame, theirs: pd.DataFrame, warning: str) -> str:
    """Return the table in Markdown; a column says whose results each row has."""
    head = ["model", "from", *(" ".join(HEADS[column]) for column in COLUMNS)]
    style = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    lines = [
        [row["name"], row["source"], *(style[x["mark"]].format(x["text"]) for x in row["cells"])]
        for group in groups(ours, theirs)
        for row in group["rows"]
    ]
    parts = (markdown_table(head, lines), f"**{warning}**" if warning else "", NOTE)
    return "\n\n".join(part for part in parts if part) + "\n"


def warnings(runs: Sequence[Run]) -> str:
    """Return warnings about runs that were not measured on whole tasks, or not like the others."""
    said, rows = [], own_rows(runs)
    for column, due, sentence, show in ALIKE:
        models = rows.dropna(subset=[column]).groupby(column)["model"].agg(", ".join)
        if len(models) >= due:
            parts = [f"{show.format(value)} ({names})" for value, names in models.items()]
            said.append(sentence.format("; ".join(parts)))
    asked: dict[str, set[tuple[str, ...]]] = {}
    for run in runs:
        for task, values in run.zero_shot.get("tasks", {}).items():
            digests = (values["key"]["rows_sha256"], values["key"]["definition_sha256"])
            asked.setdefault(task, set()).add(digests)
    if unlike := sorted(task for task, found in asked.items() if len(found) > 1):
        said.append(f"Not of the same rows, or by another definition: {', '.join(unlike)}.")
    return " ".join(said)
