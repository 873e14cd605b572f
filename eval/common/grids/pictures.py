"""Pictures of figures: a number against length, width or another, means and every run."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eval.common.grids.places import CONTROL, NEGATIVE, Run
from eval.common.style import INK, MARKERS, MUTED, PAPER, RUN_COLOURS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Rows = Sequence[tuple[Run, dict[str, Any]]]
    Points = Callable[[Run, dict[str, Any]], dict[int, float]]

# Greys mean the control and the frame here.
COLOURS = tuple(c for c in RUN_COLOURS if c not in ("#56708a", "#4d4d4d"))
CEILING = {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.2, "zorder": 2}
_ROOM = 0.03  # below the least number
_APART = 2**0.025  # lines of equal accuracy stand beside each other by this factor in length


_LETTERS = 12  # of a title, to an inch
AXES = {"length": "sequence length", "width": "model width"}
MEASURES = {"r2": "R²"}


def draw(
    rows: Rows,
    points: Points,
    title: str,
    ceiling: Points | None = None,
    axis: str = "length",
    measure: str = "accuracy",
) -> Figure:
    """Panels of accuracy against length or width.

    Args:
        points: what of a run stands where: length -> accuracy.
        title: above all panels.
        ceiling: how far one token goes, likewise.
        axis: length or width, or the words of another.
        measure: the name of the number.

    Rows stand below each other, and beside each other where there is one column. The title is
    broken where panels end: a legend stands at their right.
    """
    shown = [(run, record) for run, record in rows if run.row != CONTROL]
    bottom = _bottom([y for run, record in shown for y in points(run, record).values()])
    down, across = (list(dict.fromkeys(getattr(r, k) for r, _ in shown)) for k in ("row", "column"))
    lines = list(dict.fromkeys(run.line for run, _ in shown))
    places = [[(row, column) for column in across] for row in down]
    if len(across) == 1:
        places = [[place for row in places for place in row]]
    high, wide = len(places), len(places[0])
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(2.9 + 2.9 * wide, 0.9 + 2.4 * high), layout="constrained")
        panels = drawing.subplots(high, wide, squeeze=False, sharey=True)
        limited = False
        for axes, place in zip(panels.flat, [p for row in places for p in row], strict=True):
            part = [(r, d) for r, d in shown if (r.row, r.column) == place]
            _panel(axes, part, lines, points, bottom)
            limited |= ceiling is not None and _ceiling(axes, part, ceiling)
            axes.set_title(", ".join(filter(None, place)), loc="left", fontsize=9, color=INK)
        for axes in panels[-1]:
            axes.set_xlabel(AXES.get(axis, axis))
        for axes in panels[:, 0]:
            axes.set_ylabel(MEASURES.get(measure, measure))
        drawing.legend(
            handles=_legend(lines, shown, limited), loc="outside right upper", fontsize=8
        )
        told = [textwrap.fill(line, int(_LETTERS * 2.9 * wide)) for line in title.split("\n")]
        drawing.suptitle("\n".join(told), fontsize=10, x=0.01, ha="left")
    return drawing


def _style(index: int, line: str) -> dict[str, Any]:
    """Style a line: by colour and marker, from the ninth on dashed and hollow too."""
    if line == NEGATIVE:
        return {"color": MUTED, "linestyle": ":", "marker": "x", "linewidth": 1.0}
    again = index >= len(COLOURS)
    colour = COLOURS[index % len(COLOURS)]
    return {
        "color": colour,
        "linestyle": "--" if again else "-",
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": PAPER if again else colour,
        "linewidth": 1.5,
    }


def _bottom(values: Sequence[float]) -> float:
    """The lower edge of panels: below 0 where numbers are (R²), and not below −1."""
    return max(-1.0, min([0.0, *filter(math.isfinite, values)])) - _ROOM


def _panel(axes: Axes, part: Rows, lines: Sequence[str], points: Points, bottom: float) -> None:
    """Draws lines. What is below the lower edge, as a run that diverged, stands on it."""
    middle = (len(lines) - 1) / 2
    ticks = sorted({x for run, record in part for x in points(run, record)})
    apart = _APART if len(ticks) > 1 else 1.2 ** (1 / len(lines))
    for index, line in enumerate(lines):
        every = [p for run, d in part if run.line == line for p in points(run, d).items()]
        if not every:
            continue
        mean = _means(every)
        style, beside = _style(index, line), apart ** (index - middle)
        # The first lines, CAT's, stand above the others.
        axes.plot(
            [x * beside for x in mean],
            [max(y, bottom) for y in mean.values()],
            **style,
            markersize=4.5,
            zorder=3 + (len(lines) - index) / len(lines),
        )
        xs, ys = [x * beside for x, _ in every], [max(y, bottom) for _, y in every]
        axes.scatter(xs, ys, s=10, color=style["color"], alpha=0.5, linewidths=0, zorder=5)
    for length in {run.cell.seq_len for run, _ in part if run.across == "lengths"}:
        axes.axvline(length, color=MUTED, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(bottom, 1.05)


def _means(points: Sequence[tuple[int, float]]) -> dict[int, float]:
    """The mean of all numbers at each place, in order."""
    places = sorted({x for x, _ in points})
    return {place: statistics.fmean(y for x, y in points if x == place) for place in places}


def _ceiling(axes: Axes, part: Rows, ceiling: Points) -> bool:
    """Draws how far one token goes, if the panel has that; whether it has."""
    mean = _means([p for run, record in part for p in ceiling(run, record).items()])
    # A single length is a line across the panel.
    if len(mean) == 1:
        axes.axhline(*mean.values(), **CEILING)
    elif mean:
        axes.plot(list(mean), list(mean.values()), **CEILING)
    return bool(mean)


def _legend(lines: Sequence[str], shown: Rows, limited: bool) -> list[Line2D]:
    handles = []
    for index, line in enumerate(lines):
        style = {"markersize": 4.5, **_style(index, line)}
        handles.append(Line2D([], [], label=_label(line, shown), **style))
    point = {"linestyle": "none", "marker": "o", "markersize": 3, "alpha": 0.5, "color": MUTED}
    handles.append(Line2D([], [], label="every run (line: the mean)", **point))
    if limited:
        handles.append(Line2D([], [], label="one token matched alone", **CEILING))
    if any(run.across == "lengths" for run, _ in shown):
        trained = {"linestyle": (0, (4, 3)), "color": MUTED, "linewidth": 1}
        handles.append(Line2D([], [], label="trained length", **trained))
    return handles


def _label(line: str, shown: Rows) -> str:
    """A line's name, with its layers where all its runs have as many."""
    layers = {record["layers"] for run, record in shown if run.line == line}
    if line == NEGATIVE:
        return f"{line} (control)"
    if len(layers) > 1:
        return line
    return f"{line} ({(n := layers.pop())} layer{'s'[: n - 1]})"
