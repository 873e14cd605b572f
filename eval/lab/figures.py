"""Figures of studies: curves against an axis, strips of named lines, and heat maps of filters.

All of them show every run beside the means, as a mean of runs that find a task and of runs that do
not is a value that no run has.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eval.common.style import (
    GRID,
    INK,
    LAGS,
    MARKERS,
    MUTED,
    PAPER,
    RUN_COLOURS,
    STYLE,
    diverging_map,
)
from eval.lab.frame import Line, mean
from eval.lab.places import CONTROL, NEGATIVE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from eval.lab.study import Study

# Grey is reserved for the control and the frame.
COLOURS = tuple(c for c in RUN_COLOURS if c not in ("#56708a", "#4d4d4d"))
CEILING = {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.2, "zorder": 2}
LIMIT = "one_token_ceiling"  # the key in `also` of the last-token baseline, a dotted line
_AXES = {"length": "context length (tokens)"}  # The names of axes in words.
_WIDE = 2.9  # The width of a panel in inches.
_LETTERS, _NAME_LETTERS = 12, 14  # The letters of a title and of a legend that fit an inch.
# The margin of a strip at both sides as a fraction of its range, and the least range.
_MARGIN, _LEAST = 0.08, 0.02
_NUMBERED = 6  # Heat maps with more taps show no numbers.
_TICKED = 24  # With more lags only every fourth has a tick.
_APART = 0.11  # The vertical offset between runs in a strip's row, so that equal ones are visible.


def draw(study: Study, record: dict[str, Any]) -> Figure:
    """Draw a study's figure from its record: curves where its lines have several places."""
    lines = [line for line in record["lines"] if line["row"] != CONTROL]
    title = f"{record['study']}, {record['scale']} scale"
    failed = dict.fromkeys(x["row"] for x in record["controls"] if not x["passed"])
    title += f"\ncontrol failed: {', '.join(failed)}" if failed else ""
    measure = study.measure_of
    if study.figure == "losses":
        return draw_losses(lines, title, study.axis, measure, record["extra"]["training_length"])
    if study.figure == "strips":
        return draw_strips(lines, title, measure, colours="column")
    if all(len({x["x"] for x in part}) < 2 for part in _panels(lines).values()):
        return draw_strips(lines, title, measure)
    return draw_curves(lines, title, study.axis, measure)


def draw_curves(
    lines: Sequence[Line], title: str, axis: str, measure: Callable[[str], str]
) -> Figure:
    """Draw a panel for each row and column: the mean of each line, and every run.

    Rows of panels stand below each other, or beside each other where there is one column.
    """
    names = list(dict.fromkeys(line["line"] for line in lines))
    places = _layout(lines)
    bottom = min([0.0, *(v for line in lines for v in _values(line))])
    bottom = max(-1.0, bottom) - 0.03
    with matplotlib.rc_context(STYLE):
        beside = max(_WIDE, 0.6 + max(map(len, names)) / _NAME_LETTERS)
        size = (beside + _WIDE * len(places[0]), 0.9 + 2.4 * len(places))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(places), len(places[0]), squeeze=False, sharey=True)
        for axes, place in zip(panels.flat, (p for row in places for p in row), strict=True):
            part = _panels(lines).get(place, [])
            _curves(axes, part, names, bottom)
            axes.set_title(", ".join(filter(None, place)), loc="left", fontsize=9, color=INK)
        for axes in panels[-1]:
            axes.set_xlabel(_AXES.get(axis, axis))
        for axes, row in zip(panels[:, 0], places, strict=True):
            axes.set_ylabel(measure(row[0][0]))
        handles = _keys(names, "every run (line: the mean)")
        if any(LIMIT in line["also"] for line in lines):
            handles.append(Line2D([], [], label="one token matched alone", **CEILING))
        figure.legend(handles=handles, loc="outside right upper", fontsize=8)
        _title(figure, title, _WIDE * len(places[0]))
    return figure


def draw_losses(
    lines: Sequence[Line], title: str, axis: str, measure: Callable[[str], str], trained: int
) -> Figure:
    """Draw for each row strips of what was measured at the trained length, and curves by length.

    Args:
        lines: whose columns are ways of reading; those that stand at several lengths get curves.
    """
    names = list(dict.fromkeys(line["line"] for line in lines))
    of_row: dict[str, list[tuple[tuple[str, str], list[Line], bool]]] = {}
    for is_strip in (True, False):
        for place, part in _panels(lines).items():
            shown = [x for x in part if x["x"] == trained] if is_strip else part
            if shown and (is_strip or len({x["x"] for x in part}) > 1):
                of_row.setdefault(place[0], []).append((place, shown, is_strip))
    drawn = {x["line"] for panels in of_row.values() for _, shown, _ in panels for x in shown}
    names = [name for name in names if name in drawn]
    wide = max(map(len, of_row.values()))
    with matplotlib.rc_context(STYLE):
        high = 0.9 + max(2.0, 0.18 * len(names))
        size = (2.0 + 3.3 * wide, 0.9 + high * len(of_row) + 0.2 * -(-len(names) // 4))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(of_row), wide, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for beside, panels in zip(grid, of_row.values(), strict=True):
            for number, (place, shown, is_strip) in enumerate(panels):
                axes = beside[number]
                axes.set_axis_on()
                if is_strip:
                    _strip(axes, shown, names, None)
                    axes.tick_params(labelleft=number == 0)
                else:
                    _curves(axes, shown, names, None)
                    axes.set_ylabel(measure(place[0]), fontsize=8)
                label = _AXES.get(axis, axis)
                if is_strip:
                    label = f"{measure(place[0])}, {axis} {trained:,}"
                axes.set_xlabel(label, fontsize=8)
                axes.set_title(", ".join(place), loc="left", fontsize=9, color=INK)
        handles = _keys(names, "every run (bar, line: the mean)")
        figure.legend(handles=handles, loc="outside lower center", fontsize=8, ncols=4)
        _title(figure, title, 3.3 * wide)
    return figure


def _curves(axes: Axes, part: Sequence[Line], names: Sequence[str], bottom: float | None) -> None:
    """Draw a panel's lines; values below its lower edge, as of diverged runs, are drawn on it."""
    floor = -math.inf if bottom is None else bottom
    ticks = sorted({line["x"] for line in part})
    apart = 2**0.025 if len(ticks) > 1 else 1.2 ** (1 / len(names))
    for index, name in enumerate(names):
        own = sorted((line for line in part if line["line"] == name), key=lambda line: line["x"])
        beside = apart ** (index - (len(names) - 1) / 2)
        means = [(line["x"], statistics.fmean(v)) for line in own if (v := _values(line))]
        style = _style(index, name)
        axes.plot(
            [x * beside for x, _ in means],
            [max(y, floor) for _, y in means],
            **style,
            markersize=4.5,
            zorder=3 + (len(names) - index) / len(names),  # Draw the first lines above the others.
        )
        every = [(line["x"] * beside, max(v, floor)) for line in own for v in _values(line)]
        if every:
            dots = {"s": 10, "color": style["color"], "alpha": 0.5, "linewidths": 0, "zorder": 5}
            axes.scatter(*zip(*every, strict=True), **dots)
    limits = {line["x"]: mean(line["also"][LIMIT]) for line in part if LIMIT in line["also"]}
    if len(limits) == 1:
        axes.axhline(*limits.values(), **CEILING)
    elif limits:
        axes.plot(sorted(limits), [limits[x] for x in sorted(limits)], **CEILING)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.margins(x=0.1)
    if bottom is not None:
        axes.set_ylim(bottom, max(1.05, axes.get_ylim()[1]))


def draw_strips(
    lines: Sequence[Line], title: str, measure: Callable[[str], str], *, colours: str = "line"
) -> Figure:
    """Draw panels with the lines by name from above: every run of each, and a bar at their mean.

    What mixes nothing does not widen a panel's range, as it would hide the differences: what is
    outside, and how many runs diverged, stands as text at the edge.

    Args:
        measure: the row of a panel -> what stands on its axis.
        colours: `line`, with a panel for each row and column; or `column`, with a panel for each
            row, in which a line has the runs of all columns.
    """
    names = list(dict.fromkeys(line["line"] for line in lines))
    columns = list(dict.fromkeys(line["column"] for line in lines))
    places = _layout(lines) if colours == "line" else [[(row, "")] for row in _rows(lines)]
    with matplotlib.rc_context(STYLE):
        across = _WIDE if colours == "line" else 7.0
        height = max(1.3, 0.6 + (0.2 if colours == "line" else 0.34) * len(names))
        size = (max(6.0, 1.6 + across * len(places[0])), 1.2 + (0.2 + height) * len(places))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(places), len(places[0]), squeeze=False, sharey=True)
        for axes, place in zip(panels.flat, (p for row in places for p in row), strict=True):
            own = [x for x in lines if x["row"] == place[0]]
            own = [x for x in own if x["column"] == place[1]] if colours == "line" else own
            _strip(axes, own, names, columns if colours == "column" else None)
            axes.set_title(", ".join(filter(None, place)), loc="left", fontsize=9, color=INK)
            axes.set_xlabel(measure(place[0]), fontsize=8)
        key = "every run (bar: the mean)"
        handles = [_run_key(f"{key}; each panel has its own range" if len(places) > 1 else key)]
        if colours == "column":
            handles += [
                Line2D([], [], label=name, linestyle="none", markersize=4.5, **_mark(index))
                for index, name in enumerate(columns)
            ]
        if any(LIMIT in line["also"] for line in lines):
            handles.append(Line2D([], [], label="one token matched alone", **CEILING))
        figure.legend(handles=handles, loc="outside lower right", fontsize=8, ncols=4)
        _title(figure, title, across * len(places[0]) + 1.6)
    return figure


def draw_taps(
    panels: Mapping[str, Sequence[Sequence[float]]],
    names: Sequence[str],
    said: Sequence[str],
    title: str,
) -> Figure:
    """Draw filters as heat maps, a panel for each stream: a row for each filter, scaled to its
    largest tap, a column for each lag.

    Args:
        panels: stream -> taps of each row, of any length.
        names: names of the rows, which are drawn at the left.
        said: texts of the rows, which are drawn at the right.
    """
    longest = max(len(taps) for rows in panels.values() for taps in rows)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        # Inches: what the names take at 8 points, and room for a number in each cell.
        beside = 1.6 + 0.062 * max(map(len, names))
        wide = max(1.2, 0.42 * longest) if longest <= _NUMBERED else 2.2
        size = (beside + wide * len(panels), 1.2 + 0.24 * len(names))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (stream, rows) in zip(grid, panels.items(), strict=True):
            _taps(axes, rows, longest)
            axes.set_title(stream, fontsize=10, color=INK)
        grid[0].set_yticks(range(len(names)), names, fontsize=8)
        right = grid[-1].secondary_yaxis("right")
        right.set_yticks(range(len(said)), said, fontsize=8)
        right.spines[:].set_visible(False)
        right.tick_params(length=0)
        figure.suptitle(title, fontsize=9)
    return figure


def _taps(axes: Axes, filters: Sequence[Sequence[float]], longest: int) -> None:
    values = np.full((len(filters), longest), np.nan)
    for row, taps in enumerate(filters):
        values[row, : len(taps)] = taps
    largest = np.array([max(map(abs, taps), default=1.0) for taps in filters])[:, None]
    axes.imshow(values / largest, cmap=diverging_map(), vmin=-1, vmax=1, aspect="auto")
    for (row, lag), value in np.ndenumerate(values) if longest <= _NUMBERED else ():
        if np.isfinite(value):
            colour = "white" if abs(value) > 0.6 * largest[row, 0] else INK
            axes.text(lag, row, f"{value:.2f}", ha="center", va="center", color=colour, size=7)
    axes.set_facecolor(GRID)  # The background shows where a filter ends before the longest.
    step = 1 if longest <= _NUMBERED else 4 * math.ceil(longest / _TICKED)
    axes.set_xticks(range(0, longest, step))
    axes.set_yticks([])
    axes.set_xlabel(LAGS)
    axes.spines[:].set(visible=True, color=MUTED)
    axes.tick_params(length=0)


def _strip(
    axes: Axes, part: Sequence[Line], names: Sequence[str], columns: Sequence[str] | None
) -> None:
    limits = [mean(line["also"][LIMIT]) for line in part if LIMIT in line["also"]]
    low, high = _range([v for x in part if x["line"] != NEGATIVE for v in _values(x)], limits)
    axes.set_xlim(low, high)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    for limit in dict.fromkeys(limits):
        axes.axvline(limit, **CEILING)
    for line in part:
        index, height = names.index(line["line"]), 0.0
        look = _style(index, line["line"]) | {"linestyle": "none"}
        if columns is not None:
            number = columns.index(line["column"])
            height = (number - (len(columns) - 1) / 2) * 0.8 / len(columns)
            look = _mark(number) | {"linestyle": "none"}
        _strip_row(axes, line, index + height, look, 0.0 if columns else _APART)


def _strip_row(axes: Axes, line: Line, height: float, look: dict[str, Any], apart: float) -> None:
    low, high = axes.get_xlim()
    values = _values(line)
    centre = (len(values) - 1) / 2
    inside = [(x, height + apart * (i - centre)) for i, x in enumerate(values) if low <= x <= high]
    if inside:
        axes.plot(*zip(*inside, strict=True), **look, markersize=4.2, alpha=0.75, zorder=5)
    if values and low <= (middle := statistics.fmean(values)) <= high:
        bar = {"marker": "|", "markersize": 13 if apart else 8, "markeredgewidth": 1.6}
        axes.plot(middle, height, **bar, color=look["color"], zorder=4)
    left, right = [x for x in values if x < low], [x for x in values if x > high]
    lost = len(line["runs"]) - len(values)
    said = [f"← {_numbers(left)}"] * bool(left) + [f"{lost} diverged"] * bool(lost)
    beyond = f"{_numbers(right)} →" * bool(right)
    for at, side, words in ((0.01, "left", ", ".join(said)), (0.99, "right", beyond)):
        if words:
            where = {"transform": axes.get_yaxis_transform(), "ha": side, "va": "center"}
            axes.text(at, height, words, **where, color=MUTED, fontsize=7)


def _range(values: Sequence[float], limits: Sequence[float]) -> tuple[float, float]:
    """Return the range that a strip shows, limited for R²."""
    every = [*values, *limits]
    shown = [x for x in every if x > -1.0] or every or [0.0, 1.0]
    wide = max(max(shown) - min(shown), _LEAST)
    middle = (min(shown) + max(shown)) / 2
    low, high = middle - (0.5 + _MARGIN) * wide, middle + (0.5 + _MARGIN) * wide
    above = max(0.0, high - 1 - _MARGIN * wide) if max(shown) <= 1 else 0.0
    return low - above, high - above


def _values(line: Line) -> list[float]:
    return [v for v in line["runs"].values() if v is not None and math.isfinite(v)]


def _rows(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["row"] for line in lines))


def _layout(lines: Sequence[Line]) -> list[list[tuple[str, str]]]:
    """Return the grid of panels (row, column); some may be empty."""
    columns = list(dict.fromkeys(line["column"] for line in lines))
    places = [[(row, column) for column in columns] for row in _rows(lines)]
    return [[place for row in places for place in row]] if len(columns) == 1 else places


def _panels(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    panels: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        panels.setdefault((line["row"], line["column"]), []).append(line)
    return panels


def _style(index: int, name: str) -> dict[str, Any]:
    """Return a line's style: colour and marker; from the eleventh on also dashed and hollow."""
    if name == NEGATIVE:
        return {"color": MUTED, "linestyle": ":", "marker": "x", "linewidth": 1.0}
    again = index >= len(COLOURS)
    style = _mark(index) | {"linestyle": "--" if again else "-", "linewidth": 1.5}
    return style | {"markerfacecolor": PAPER if again else style["color"]}


def _mark(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def _label(name: str) -> str:
    return f"{name} (control)" if name == NEGATIVE else name


def _keys(names: Sequence[str], every_run: str) -> list[Line2D]:
    styles = [(name, _style(index, name)) for index, name in enumerate(names)]
    keys = [Line2D([], [], label=_label(name), markersize=4.5, **style) for name, style in styles]
    return [*keys, _run_key(every_run)]


def _run_key(label: str) -> Line2D:
    point = {"linestyle": "none", "marker": "o", "markersize": 3, "alpha": 0.5, "color": MUTED}
    return Line2D([], [], label=label, **point)


def _title(figure: Figure, title: str, wide: float) -> None:
    lines = [textwrap.fill(line, int(_LETTERS * wide)) for line in title.split("\n")]
    figure.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left")


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.3f}" for x in values)
