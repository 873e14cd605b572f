"""Draw sweeps, perplexity over dense attention's by what is read; and how matches are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

from eval.common.style import MUTED, PAPER, STYLE, legend_key, plain_label, run_colour, run_marker
from eval.landmark.options import SELECTORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = (3.6, 3.0)  # inches
# Names of the columns for people.
AXES = {"share": "keys read, of all", "bytes": "bytes read by the last token, of dense attention's"}


def sweep_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a row of panels for each model, at the largest length: by keys, and by bytes.

    Every selector has a colour; points of one block size are joined.

    Args:
        rows: as `eval.landmark.sweep` gives them.
    """
    length = max(row["length"] for row in rows)
    shown = [row for row in rows if row["length"] == length and row["block"] is not None]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    present = [name for name in SELECTORS if any(row["select"] == name for row in shown)]
    with matplotlib.rc_context(STYLE):
        size = (2 * PANEL[0], PANEL[1] * len(labels) + 0.4)
        figure = Figure(size, layout="constrained")
        panels = figure.subplots(len(labels), 2, squeeze=False, sharey="row")
        for of_label, label in zip(panels, labels, strict=True):
            own = [row for row in shown if row["label"] == label]
            for axes, kind in zip(of_label, AXES, strict=True):
                _panel(axes, own, kind)
            of_label[0].set_title(plain_label(f"{label}, {length:,} tokens"), loc="left")
        keys = [legend_key(name, SELECTORS.index(name)) for name in present]
        figure.legend(handles=keys, loc="outside lower center", ncols=4)
        return figure


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    for name, block in dict.fromkeys((row["select"], row["block"]) for row in rows):
        line = [row for row in rows if (row["select"], row["block"]) == (name, block)]
        line.sort(key=lambda row: row["top_k"])
        index = SELECTORS.index(name)
        axes.plot(
            [_read(row, kind) for row in line],
            [100 * row["over_dense"] for row in line],
            color=run_colour(index),
            marker=run_marker(index),
            mec=PAPER,
            linewidth=1.0,
        )
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xscale("log", base=2)
    _percent_axis(axes)
    axes.set_xlabel(AXES[kind])
    axes.set_ylabel("perplexity over dense (%)" if kind == "share" else "")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _percent_axis(axes: Axes) -> None:
    """Use a symlog axis: perplexity increases differ by orders of magnitude."""
    axes.set_yscale("symlog", linthresh=1.0)
    ticks = SymmetricalLogLocator(base=10, linthresh=1.0, subs=(1.0, 2.0, 5.0))
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _read(row: Mapping[str, Any], kind: str) -> float:
    if kind == "share":
        return row["share"]
    return (row["selector_bytes"] + row["key_value_bytes"]) / row["dense_bytes"]


def retrieval_figure(series: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw how often the match's block is chosen against SNR², as measured and by the law.

    Args:
        series: name -> points as `eval.landmark.diagnose.retrieval_points` gives them.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure((PANEL[0] + 1.4, PANEL[1] + 0.8), layout="constrained")
        axes = figure.subplots()
        for index, (name, points) in enumerate(series.items()):
            x, colour = [point["x"] for point in points], run_colour(index)
            look = {"linestyle": "", "marker": run_marker(index), "color": colour}
            measured = [point["retrieved"] for point in points]
            axes.plot(x, measured, **look, label=plain_label(name))
            law = {"label": "the law"} if index == 0 else {}
            predicted = [point["predicted"] for point in points]
            axes.plot(x, predicted, color=colour, linewidth=1.0, **law)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("SNR² / (2 b ln(m / k))")
        axes.set_ylabel("the match's block is chosen")
        axes.legend(fontsize=7)
        return figure
