"""The controls of a figure: its first model learns, and nothing is learned from nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eval.lab.places import CONTROL, NEGATIVE
from eval.lab.study import Control, Rows

LEARNS = {"cummax": 0.95, "cumsum": 0.95, "select": 0.9}  # R² that the first model must have
GUESSES = 0.05  # R² on Select that a model which mixes nothing must not have
_DEVIATIONS = 5  # of an accuracy


def controls(rows: Rows) -> list[Control]:
    """Check each task: that its models learned it, and that nothing was learned from nothing.

    Positive, for classes: the mean of a line's seeds, of the best model, is five deviations of a
    test above that of a model which mixes nothing and takes the mean over positions, a bag of
    tokens; of values, the first model's mean R² is that of LEARNS. Negative: a model that was
    trained with other rows' labels, the first model on test rows with others' inputs, and one that
    mixes nothing where classes are read from the last position, are at most five deviations above
    the share of the most frequent class; on Select, R² of what mixes nothing is at most 0.05.
    """
    found: list[Control] = []
    for row in dict.fromkeys(run.row for run, _ in rows if run.row != CONTROL):
        of_row = [(run, record) for run, record in rows if run.row == row]
        beside = [x for x in rows if x[0].row == CONTROL and x[0].column == row]
        nothing = next(record for run, record in of_row if run.line == NEGATIVE)
        if nothing["data"]["test"]["most_frequent"] is None:
            found += _of_values(row, of_row, nothing)
        else:
            found += _of_classes(row, of_row, nothing, beside)
    return found


def _of_values(row: str, of_row: Rows, nothing: dict[str, Any]) -> Iterator[Control]:
    first, mean = next(iter(_means(of_row).items()))
    yield _at_least(row, "learns", first, mean, LEARNS[row])
    if row == "select":
        yield _at_most(row, "mixes nothing", NEGATIVE, nothing["value"], GUESSES)


def _of_classes(row: str, of_row: Rows, nothing: dict[str, Any], beside: Rows) -> Iterator[Control]:
    best, mean = max(_means(of_row).items(), key=lambda item: item[1])
    share = max(nothing["value"], nothing["data"]["test"]["most_frequent"])  # it may diverge
    bound = share + _margin(nothing, share)
    yield _at_least(row, "learns", best, mean, bound)
    first = next(run.line for run, _ in of_row if run.line != NEGATIVE)
    tested = [record for run, record in of_row if run.line == first]
    most = max(record["exchanged"] for record in tested)
    yield _at_most(row, "other rows' inputs", first, most, _guessed(tested[0]))
    for run, record in beside:
        what = "mixes nothing" if run.line == NEGATIVE else "other rows' labels"
        yield _at_most(row, what, run.line, record["value"], _guessed(record))


def _means(of_row: Rows) -> dict[str, float]:
    """Each line's mean over seeds, in order; of several cells, at their best."""
    values: dict[str, dict[Any, list[float]]] = {}
    for run, record in of_row:
        if run.line != NEGATIVE:
            cells = values.setdefault(run.line, {})
            cells.setdefault(replace(run.cell, seed=0), []).append(record["value"])
    return {line: max(map(statistics.fmean, cells.values())) for line, cells in values.items()}


def _guessed(record: dict[str, Any]) -> float:
    """Return what a model that knows nothing of a row reaches at most."""
    share = record["data"]["test"]["most_frequent"]
    return share + _margin(record, share)


def _margin(record: dict[str, Any], share: float) -> float:
    """Five deviations of a test's accuracy."""
    return _DEVIATIONS * math.sqrt(share * (1 - share) / record["data"]["test"]["rows"])


def _at_least(row: str, what: str, mixer: str, value: float, bound: float) -> Control:
    means = "Models may be under-trained; their order says nothing."
    return Control(row, "positive", what, mixer, value, bound, means)


def _at_most(row: str, what: str, mixer: str, value: float, bound: float) -> Control:
    means = (
        "Positions hold their own answers: nothing has to be mixed."
        if what == "mixes nothing"
        else "Labels reach the model by another way than its rows."
    )
    return Control(row, "negative", what, mixer, value, bound, means)
