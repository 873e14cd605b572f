"""The picture of loss by position in the window, beside the sweep's own in eval/figures.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from eval.figures import MARKERS, MUTED, PAPER, STYLE, WIDE, run_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_TOKENS = 32  # in a bin, below which its mean says nothing
LINES = {"none": "-", "pi": ":", "yarn": "-.", "pi+temperature": "--", "temperature": "--"}


def position_figure(rows: Sequence[Mapping[str, Any]], size: tuple[float, float] = WIDE) -> Figure:
    """The loss of a token by how many tokens before it the model saw, at the largest length.

    Colours and markers are the models', line styles the methods'. Bins of a few tokens are left
    out.

    Args:
        rows: as eval.length_sweep gives them, with `positions`.
    """
    labels = list(dict.fromkeys(row["label"] for row in rows))
    largest = max(row["length"] for row in rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        for row in rows:
            if row["length"] == largest:
                _position_line(axes, row, labels.index(row["label"]))
        trained = {row["training_length"] for row in rows if row["training_length"]}
        for length in trained:
            axes.axvline(length, color=MUTED, ls=(0, (4, 3)), lw=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        dashed = " (dashed line: training length)" if trained else ""
        axes.set_xlabel(f"tokens seen, in windows of {largest:,}{dashed}")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.03)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
        return figure


def _position_line(axes: Axes, row: Mapping[str, Any], index: int) -> None:
    bins = [
        part
        for part in row["positions"]
        if part["tokens"] >= MIN_TOKENS and part["loss"] is not None
    ]
    method = row["method"]
    axes.plot(
        # A bin's tokens saw from start to stop − 1 tokens.
        [((part["start"] * (part["stop"] - 1)) ** 0.5) for part in bins],
        [part["loss"] for part in bins],
        color=run_colour(index),
        marker=MARKERS[index % len(MARKERS)],
        markersize=3,
        mec=PAPER,
        mew=0.4,
        lw=1.3,
        ls=LINES[method],
        label=row["label"] if method == "none" else f"{row['label']}, {method}",
    )
