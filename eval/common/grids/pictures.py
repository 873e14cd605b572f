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
from eval.common.grids.strips import strip
from eval.common.style import INK, MARKERS, MUTED, PAPER, RUN_COLOURS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Rows = Sequence[tuple[Run, dict[str, Any]]]
    Points = Callable[[Run, dict[str, Any]], dict[int, float]]

# Greys mean the control and the frame here.
COLOURS = tuple(c for c in RUN_COLOURS if c not in ("#56708a", "#4d4d4d"))
CEILING = {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.2, "zorder": 2}
_ROOM = 0.03  # below the least number
_APART = 2**0.025  # lines of equal accuracy stand beside each other by this factor in length


_WIDE = 2.9  # inches of a panel, and the least beside all of them
_LETTERS, _NAME_LETTERS = 12, 14  # of a title and of a legend, to an inch
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
    broken where panels end: a legend stands at their right. Where no panel has more than one
    length, its lines are named rows and the number goes across.
    """
    shown = [(run, record) for run, record in rows if run.row != CONTROL]
    names = {line: _label(line, shown) for line in dict.fromkeys(run.line for run, _ in shown)}
    places = _places(shown)
    high, wide = len(places), len(places[0])
    parts = [[x for x in shown if (x[0].row, x[0].column) == p] for row in places for p in row]
    single = all(len(_ticks(part, points)) < 2 for part in parts)
    bottom = _bottom([y for run, record in shown for y in points(run, record).values()])
    with matplotlib.rc_context(STYLE):
        room = max(_WIDE, 0.6 + max(map(len, names.values())) / _NAME_LETTERS)
        size = (1.6, 1.2, max(1.3, 0.6 + 0.2 * len(names))) if single else (room, 0.9, 2.4)
        size = (size[0] + _WIDE * wide, size[1] + size[2] * high)
        drawing = Figure(figsize=size, layout="constrained")
        panels = drawing.subplots(high, wide, squeeze=False, sharey=True)
        limited = False
        for axes, part in zip(panels.flat, parts, strict=True):
            if single:
                limits = list(_limits(part, ceiling).values())
                strip(axes, _numbers(part, points), names, _style, limits)
            else:
                _panel(axes, part, list(names), points, bottom)
            limited |= _ceiling(axes, _limits(part, ceiling), across=not single)
        ticks = [_ticks(part, points) for part in parts] if single else None
        _words(panels, places, AXES.get(axis, axis), MEASURES.get(measure, measure), ticks)
        where = "outside lower right" if single else "outside right upper"
        handles = _legend({} if single else names, shown, limited, len(parts))
        drawing.legend(handles=handles, loc=where, fontsize=8)
        told = [textwrap.fill(line, int(_LETTERS * _WIDE * wide)) for line in title.split("\n")]
        drawing.suptitle("\n".join(told), fontsize=10, x=0.01, ha="left")
    return drawing


def _places(shown: Rows) -> list[list[tuple[str, str]]]:
    """The grid of panels; some may have no run."""
    down, across = (list(dict.fromkeys(getattr(r, k) for r, _ in shown)) for k in ("row", "column"))
    places = [[(row, column) for column in across] for row in down]
    return [[place for row in places for place in row]] if len(across) == 1 else places


def _ticks(part: Rows, points: Points) -> list[int]:
    """Where the panel has numbers."""
    return sorted({x for run, record in part for x in points(run, record)})


def _numbers(part: Rows, points: Points) -> dict[str, list[float]]:
    """Each line's numbers, wherever they are."""
    numbers: dict[str, list[float]] = {}
    for run, record in part:
        numbers.setdefault(run.line, []).extend(points(run, record).values())
    return numbers


def _words(
    panels: NDArray[Any],
    places: Sequence[Sequence[tuple[str, str]]],
    axis: str,
    number: str,
    ticks: Sequence[Sequence[int]] | None,
) -> None:
    """Writes titles and axes; with ticks, the number goes across and titles have the axis."""
    for index, place in enumerate(place for row in places for place in row):
        at = [f"{axis} {x}" for x in ticks[index]] if ticks else []
        told = ", ".join([*filter(None, place), *at])
        panels.flat[index].set_title(told, loc="left", fontsize=9, color=INK)
    for axes in panels[-1]:
        axes.set_xlabel(number if ticks else axis)
    for axes in [] if ticks else panels[:, 0]:
        axes.set_ylabel(number)


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
    ticks = _ticks(part, points)
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


def _limits(part: Rows, ceiling: Points | None) -> dict[int, float]:
    """How far one token goes, by the place on the axis; empty if the panel has no such thing."""
    return _means([p for run, d in part for p in ceiling(run, d).items()]) if ceiling else {}


def _ceiling(axes: Axes, limits: dict[int, float], *, across: bool) -> bool:
    """Draws how far one token goes, if the panel has that; whether it has."""
    # A single length is a line through the panel.
    if len(limits) == 1:
        (axes.axhline if across else axes.axvline)(*limits.values(), **CEILING)
    elif limits:
        axes.plot(list(limits), list(limits.values()), **CEILING)
    return bool(limits)


def _legend(names: dict[str, str], shown: Rows, limited: bool, panels: int) -> list[Line2D]:
    """Explains marks; names of lines there are none in strips, which have them at the left."""
    handles = []
    for index, (line, name) in enumerate(names.items()):
        handles.append(Line2D([], [], label=name, **{"markersize": 4.5, **_style(index, line)}))
    point = {"linestyle": "none", "marker": "o", "markersize": 3, "alpha": 0.5, "color": MUTED}
    told = f"every run ({'line' if names else 'bar'}: the mean)"
    told += "; each panel has its own range" if panels > 1 and not names else ""
    handles.append(Line2D([], [], label=told, **point))
    if limited:
        handles.append(Line2D([], [], label="one token matched alone", **CEILING))
    if names and any(run.across == "lengths" for run, _ in shown):
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
