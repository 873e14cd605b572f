"""Strips: the picture of a figure whose panels have one length each, a line of it a named row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from eval.common.grids.places import NEGATIVE
from eval.common.style import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Style = Callable[[int, str], dict[str, Any]]

_MARGIN = 0.08  # of the range, at both sides
_LEAST = 0.02  # the least range, so that rounding does not look like a difference
_APART = 0.11  # of a row: each run has its own height, so that equal ones are seen


def strip(
    axes: Axes,
    runs: dict[str, list[float]],
    names: dict[str, str],
    style: Style,
    ceilings: Sequence[float] = (),
) -> None:
    """Draw a panel: down the lines by name, across every run and the mean.

    Args:
        runs: line -> the numbers of its runs, accuracies or R².
        names: line -> its name, of all panels, from above.
        style: how a line looks, by its place and line.
        ceilings: numbers that are to be within the range.

    The control of what mixes nothing would hide the differences: it does not widen the range. What
    is outside, and how many diverged, stands as text at the edge.
    """
    low, high = _range([x for line in runs if line != NEGATIVE for x in runs[line]], ceilings)
    axes.set_xlim(low, high)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.set_ylim(len(names) - 0.5, -0.5)
    for index, line in enumerate(names):
        if values := runs.get(line, []):
            look = style(index, line) | {"linestyle": "none"}
            _row(axes, index, values, look)


def _range(values: Sequence[float], ceilings: Sequence[float]) -> tuple[float, float]:
    """Return what the panel shows: finite numbers, of R² none far below 0, and no room above 1."""
    finite = [x for x in (*values, *ceilings) if math.isfinite(x)]
    shown = [x for x in finite if x > -1.0] or finite or [0.0, 1.0]
    wide = max(max(shown) - min(shown), _LEAST)
    middle = (min(shown) + max(shown)) / 2
    low, high = middle - (0.5 + _MARGIN) * wide, middle + (0.5 + _MARGIN) * wide
    above = max(0.0, high - 1 - _MARGIN * wide)
    return low - above, high - above


def _row(axes: Axes, index: int, values: Sequence[float], look: dict[str, Any]) -> None:
    """Draws a line's runs and their mean, and tells those that are outside."""
    low, high = axes.get_xlim()
    finite = [x for x in values if math.isfinite(x)]
    inside = [(x, i) for i, x in enumerate(finite) if low <= x <= high]
    middle = (len(finite) - 1) / 2
    axes.plot(
        [x for x, _ in inside],
        [index + _APART * (i - middle) for _, i in inside],
        **look,
        markersize=4.2,
        alpha=0.75,
        zorder=5,
    )
    if finite and low <= (mean := statistics.fmean(finite)) <= high:
        bar = {"marker": "|", "markersize": 13, "markeredgewidth": 1.6, "color": look["color"]}
        axes.plot(mean, index, **bar, zorder=4)
    left, right = ([x for x in finite if x < low], [x for x in finite if x > high])
    lost = len(values) - len(finite)
    told = [f"← {_numbers(left)}"] * bool(left) + [f"{lost} diverged"] * bool(lost)
    for at, side, words in (
        (0.01, "left", ", ".join(told)),
        (0.99, "right", f"{_numbers(right)} →" * bool(right)),
    ):
        if words:
            where = {"transform": axes.get_yaxis_transform(), "ha": side, "va": "center"}
            axes.text(at, index, words, **where, color=MUTED, fontsize=8)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.3f}" for x in values)
