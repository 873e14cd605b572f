"""The picture of loss by position in the window, beside the sweep's own in eval/common/style.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from eval.common.style import (
    METHOD_LINES,
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

MIN_TOKENS = 32  # in a bin, below which its mean says nothing


def position_figure(rows: Sequence[Mapping[str, Any]], size: tuple[float, float] = WIDE) -> Figure:
    """The loss of a token by how many tokens before it the model saw, at the largest length.

    Colours and markers are the models', line styles the methods', as in the sweep's own picture.
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
        _legend(figure, labels, methods)
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


def _legend(figure: Figure, labels: Sequence[str], methods: Sequence[str]) -> None:
    handles = [legend_key(label, index) for index, label in enumerate(labels)]
    if len(methods) > 1:
        handles += [
            Line2D([], [], color=MUTED, ls=METHOD_LINES[method], lw=1.2, label=method)
            for method in methods
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
