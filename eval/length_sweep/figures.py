"""Draw a sweep: perplexity by context length, and loss by position in the window.

Colours and markers are the models'; methods of scaling positions differ by the style of the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from eval.common.style import (
    MANY_RUNS,
    MUTED,
    PAPER,
    STYLE,
    WIDE,
    legend_key,
    run_colour,
    run_marker,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
METHOD_LINES = {"none": "-", "pi": ":", "pi+temperature": "--", "yarn": "-.", "temperature": "--"}
MIN_GROUPS = 20  # With fewer documents or windows no error bar is drawn.
MIN_TOKENS = 32  # A bin with fewer tokens is not drawn.


def length_figure(
    rows: Rows, size: tuple[float, float] = WIDE, order: Sequence[str] | None = None
) -> Figure:
    """Draw perplexity against context length, one line for each model and method.

    Args:
        rows: as eval.length_sweep gives them.
        order: labels in the order that decides their colours; default: as they come.
    """
    order = list(order or dict.fromkeys(row["label"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        values = [row["perplexity"] for row in rows if row["perplexity"] is not None]
        for label, method in dict.fromkeys((row["label"], row["method"]) for row in rows):
            line = [r for r in rows if (r["label"], r["method"]) == (label, method)]
            line = [row for row in line if row["perplexity"] is not None]
            _length_line(axes, line, order.index(label), method)
        trained = _training_lengths(axes, rows)
        for length in trained:
            how = {"xytext": (4, -2), "textcoords": "offset points", "va": "top"}
            place = {"xy": (length, 1), "xycoords": ("data", "axes fraction")}
            axes.annotate("training length", **place, **how, color=MUTED, fontsize=8)
        lengths = sorted({row["length"] for row in rows})
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        one = next(iter(trained)) if len(trained) == 1 else None
        times = "\N{MULTIPLICATION SIGN}"
        axes.set_xticklabels(
            [f"{length:,}" + (f"\n{length / one:g}{times}" if one else "") for length in lengths]
        )
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("perplexity per token")
        if values and max(values) > 4 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.margins(x=0.06, y=0.15)
        keys = _keys(order, rows, "not scaled")
        if len(keys) <= MANY_RUNS:
            axes.legend(handles=keys, loc="best")
        else:
            columns = 4 if size[0] > 5 else 2
            figure.legend(handles=keys, loc="outside lower center", ncols=columns, fontsize=8)
        return figure


def has_error_bars(rows: Rows) -> bool:
    """Return True if there are enough groups for a meaningful standard error."""
    return all(row["standard_error"] is not None and row["groups"] >= MIN_GROUPS for row in rows)


def _length_line(axes: Axes, line: Rows, index: int, method: str) -> None:
    line, colour = sorted(line, key=lambda row: row["length"]), run_colour(index)
    bars_drawn, plain = has_error_bars(line), method == "none"
    # With error bars, lines are shifted so that they do not hide each other.
    lengths = [row["length"] * (1.02**index if bars_drawn else 1) for row in line]
    values = np.array([row["perplexity"] for row in line])
    axes.plot(
        lengths,
        values,
        color=colour,
        ls=METHOD_LINES.get(method, (0, (1, 3))),
        lw=1.8 if plain else 1.3,
        marker=run_marker(index),
        ms=5 if plain else 4,
        mec=PAPER if plain else colour,
        mfc=colour if plain else PAPER,
        zorder=4 if plain else 3,
    )
    if bars_drawn:
        # An error of e nats in the loss is a factor exp(e) in perplexity.
        errors = np.array([row["standard_error"] for row in line])
        bars = [values * (1 - np.exp(-errors)), values * (np.exp(errors) - 1)]
        axes.errorbar(lengths, values, bars, fmt="none", ecolor=colour, elinewidth=0.9, alpha=0.6)


def _training_lengths(axes: Axes, rows: Rows) -> set[int]:
    """Mark the models' training lengths on an axis of powers of two, and return them."""
    trained = {row["training_length"] for row in rows if row["training_length"]}
    for length in trained:
        axes.axvline(length, color=MUTED, ls=(0, (4, 3)), lw=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    return trained


def _keys(labels: Sequence[str], rows: Rows, unscaled: str) -> list[Line2D]:
    """Return the legend entries: models and, if there are several, methods."""
    keys = [legend_key(label, index) for index, label in enumerate(labels)]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for method in methods if len(methods) > 1 else ():
        style = {"color": MUTED, "ls": METHOD_LINES.get(method, (0, (1, 3))), "lw": 1.3}
        keys.append(Line2D([], [], label=unscaled if method == "none" else method, **style))
    return keys


def position_figure(rows: Rows, size: tuple[float, float] = WIDE) -> Figure:
    """Draw the loss against the number of tokens seen before, at the largest length.

    Bins of a few tokens are left out.

    Args:
        rows: as eval.length_sweep gives them, with `positions`.
    """
    labels = list(dict.fromkeys(row["label"] for row in rows))
    largest = max(row["length"] for row in rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        for row in (row for row in rows if row["length"] == largest):
            index = labels.index(row["label"])
            bins = [
                part
                for part in row["positions"]
                if part["tokens"] >= MIN_TOKENS and part["loss"] is not None
            ]
            axes.plot(
                # A bin's tokens saw from start to stop − 1 tokens.
                [(part["start"] * (part["stop"] - 1)) ** 0.5 for part in bins],
                [part["loss"] for part in bins],
                color=run_colour(index),
                marker=run_marker(index),
                markersize=3.5,
                mec=PAPER,
                mew=0.4,
                lw=1.8 if row["method"] == "none" else 1.2,
                ls=METHOD_LINES[row["method"]],
            )
        trained = _training_lengths(axes, rows)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        dashed = "; dashed: training length" if trained else ""
        axes.set_xlabel(f"tokens seen before the one predicted (windows of {largest:,}{dashed})")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.03)
        keys = _keys(labels, rows, "none")
        figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=8)
        return figure
