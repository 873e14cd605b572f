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

METHOD_LINES = {"none": "-", "pi": ":", "pi+temperature": "--", "yarn": "-.", "temperature": "--"}
MIN_GROUPS = 20  # documents or windows below which no error bar is drawn
MIN_TOKENS = 32  # in a bin, below which its mean says nothing


def length_figure(
    rows: Sequence[Mapping[str, Any]],
    size: tuple[float, float] = WIDE,
    order: Sequence[str] | None = None,
) -> Figure:
    """Perplexity against context length, one line for each model and method.

    Args:
        rows: as eval.length_sweep gives them.
        order: labels in the order that decides their colours; default: as they come.
    """
    order = list(order or dict.fromkeys(row["label"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        values = []
        for label, method in dict.fromkeys((row["label"], row["method"]) for row in rows):
            line = [r for r in rows if (r["label"], r["method"]) == (label, method)]
            line = sorted((r for r in line if r["perplexity"] is not None), key=_length)
            values += [row["perplexity"] for row in line]
            _length_line(axes, line, order.index(label), method)
        _length_axes(axes, rows, values)
        _length_legends(axes, order, list(dict.fromkeys(row["method"] for row in rows)), size)
        return figure


def has_error_bars(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if there are enough groups for a standard error to mean something."""
    return all(row["standard_error"] is not None and row["groups"] >= MIN_GROUPS for row in rows)


def _length(row: Mapping[str, Any]) -> int:
    return row["length"]


def _length_line(axes: Axes, line: list[Mapping[str, Any]], index: int, method: str) -> None:
    # With bars, side by side, so that they do not hide each other.
    bars_drawn = has_error_bars(line)
    lengths = [row["length"] * (1.02**index if bars_drawn else 1) for row in line]
    values = np.array([row["perplexity"] for row in line])
    colour = run_colour(index)
    plain = method == "none"
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


def _length_axes(axes: Axes, rows: Sequence[Mapping[str, Any]], values: list[float]) -> None:
    trained = {row["training_length"] for row in rows if row["training_length"]}
    lengths = sorted({row["length"] for row in rows})
    for length in trained:
        axes.axvline(length, color=MUTED, ls=(0, (4, 3)), lw=1)
        axes.annotate(
            "training length",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            va="top",
            color=MUTED,
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
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


def _length_legends(
    axes: Axes, labels: Sequence[str], methods: Sequence[str], size: tuple[float, float]
) -> None:
    """Runs by colour and marker; where there are several methods, these by the line's style."""
    handles = [legend_key(label, index) for index, label in enumerate(labels)]
    if len(methods) > 1:
        handles += [
            Line2D(
                [],
                [],
                color=MUTED,
                ls=METHOD_LINES.get(method, (0, (1, 3))),
                lw=1.3,
                label="not scaled" if method == "none" else method,
            )
            for method in methods
        ]
    if len(handles) <= MANY_RUNS:
        axes.legend(handles=handles, loc="best")
        return
    columns = 4 if size[0] > 5 else 2
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)


def position_figure(rows: Sequence[Mapping[str, Any]], size: tuple[float, float] = WIDE) -> Figure:
    """The loss of a token by how many tokens before it the model saw, at the largest length.

    Bins of a few tokens are left out.

    Args:
        rows: as eval.length_sweep gives them, with `positions`.
    """
    labels = list(dict.fromkeys(row["label"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    largest = max(row["length"] for row in rows)
    trained = {row["training_length"] for row in rows if row["training_length"]}
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        for row in rows:
            if row["length"] == largest:
                _position_line(axes, row, labels.index(row["label"]))
        for length in trained:
            axes.axvline(length, color=MUTED, ls=(0, (4, 3)), lw=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        dashed = "; dashed: training length" if trained else ""
        axes.set_xlabel(f"tokens seen before the one predicted (windows of {largest:,}{dashed})")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.03)
        _position_legend(figure, labels, methods)
        return figure


def _position_line(axes: Axes, row: Mapping[str, Any], index: int) -> None:
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


def _position_legend(figure: Figure, labels: Sequence[str], methods: Sequence[str]) -> None:
    handles = [legend_key(label, index) for index, label in enumerate(labels)]
    if len(methods) > 1:
        handles += [
            Line2D([], [], color=MUTED, ls=METHOD_LINES[method], lw=1.2, label=method)
            for method in methods
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
