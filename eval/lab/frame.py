"""From finished runs to a study's numbers: a line for each place on its axis, a frame of all runs.

A *line* is a dictionary, as records hold it: `row` and `column` of its panel, its name `line`, `x`
on the axis, `runs` (seed -> value), `also` (what else was measured -> seed -> value), the learning
rate `lr`, whether it lies `on_edge` of those `tried` (rate -> score), and, while it is in memory,
`documents`: `tokens` of each scored document, and `nats` of each seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.lab.grid import Choice
from eval.lab.places import Run

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]  # The record of a cell.
Found = Sequence[tuple[Run, Record, Choice]]
Line = dict[str, Any]
# Returns what a run and its record have measured at each place: the place is x, or (row, column, x)
# where a cell is in several panels. Models are compared by `value`, for which `documents` has the
# nats and tokens of single documents.
Values = Callable[[Run, Record], Mapping[Any, Mapping[str, Any]]]


def gather_lines(found: Found, values: Values) -> list[Line]:
    """Gather each place's runs."""
    lines: dict[tuple, Line] = {}
    for run, record, choice in found:
        seed = str(run.cell.seed)
        measured_at = {
            at if isinstance(at, tuple) else (run.row, run.column, at): measured
            for at, measured in values(run, record).items()
        }
        for at in sorted(measured_at, key=lambda place: place[2]):
            place, measured = (*at[:2], run.line, at[2]), measured_at[at]
            line = lines.setdefault(
                place,
                {
                    **dict(zip(("row", "column", "line", "x"), place, strict=True)),
                    "runs": {},
                    "also": {},
                    "lr": choice.rate,
                    "on_edge": choice.on_edge,
                    "tried": {f"{rate:g}": score for rate, score in sorted(choice.tried.items())},
                },
            )
            for name, value in measured.items():
                if name == "documents":
                    own = line.setdefault(name, {"tokens": value["tokens"], "nats": {}})
                    own["nats"][seed] = value["nats"]
                    continue
                of_name = line["runs"] if name == "value" else line["also"].setdefault(name, {})
                of_name[seed] = value
    return list(lines.values())


def mean(runs: Mapping[str, float | None]) -> float:
    """Return the mean over seeds; NaN if a run diverged."""
    return statistics.fmean(math.nan if value is None else value for value in runs.values())


def frame(lines: Iterable[Line]) -> pd.DataFrame:
    """Return a data frame with one row for each run: row, column, line, x, seed, value, lr,
    on_edge.
    """
    import pandas as pd

    shared = ("row", "column", "line", "x")
    rows = [
        {**{name: line[name] for name in shared}, "seed": int(seed), "value": value}
        | {"lr": line["lr"], "on_edge": line["on_edge"]}
        for line in lines
        for seed, value in line["runs"].items()
    ]
    return pd.DataFrame(rows, columns=[*shared, "seed", "value", "lr", "on_edge"])


def diverged_runs(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the runs whose value is not finite."""
    return [
        {"row": line["row"], "column": line["column"], "line": line["line"], "seed": int(seed)}
        for line in lines
        for seed, value in line["runs"].items()
        if value is None or not math.isfinite(value)
    ]


def origin_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return when, where and at which commits runs were trained, including earlier calls."""
    found = [record["provenance"] for record in records]
    dates = sorted(each["date"] for each in found)
    return {
        "commits": sorted({each["commit"] or "unknown" for each in found}),
        "machines": sorted({f"{each['machine']}, {each['device']}" for each in found}),
        "first": dates[0],
        "last": dates[-1],
    }
