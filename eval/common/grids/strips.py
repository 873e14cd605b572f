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


def strip(axes: Axes, runs: dict[str, list[float]], names: dict[str, str], style: Style) -> None:
    """Draw a panel: down the lines by name, across every run and the mean.

    Args:
        runs: line -> the numbers of its runs; what is not finite stands at the left edge.
        names: line -> its name, of all panels, from above.
        style: how a line looks, by its place and line.

    The control of what mixes nothing would hide the differences: it does not widen the range, and
    is told as a number where it is outside.
    """
    low, high = _range([x for line, xs in runs.items() if line != NEGATIVE for x in xs])
    axes.set_xlim(low, high)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.set_ylim(len(names) - 0.5, -0.5)
    for index, line in enumerate(names):
        if not (values := runs.get(line, [])):
            continue
        mean = statistics.fmean(values)
        if line == NEGATIVE and not low <= mean <= high:
            _outside(axes, index, mean, left=not mean > high)
            continue
        look = style(index, line)
        axes.scatter(
            [_inside(x, low) for x in values],
            [index] * len(values),
            s=16,
            marker=look["marker"],
            color=look["color"],
            alpha=0.7,
            linewidths=0.8 if line == NEGATIVE else 0,
            zorder=4,
        )
        bar = {"marker": "|", "markersize": 12, "markeredgewidth": 1.8, "color": look["color"]}
        axes.plot(_inside(mean, low), index, **bar, zorder=5)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """What the panel shows: finite numbers, and of R² nothing far below 0."""
    finite = [max(x, -1.0) for x in values if math.isfinite(x)] or [0.0, 1.0]
    middle = (min(finite) + max(finite)) / 2
    half = (0.5 + _MARGIN) * max(max(finite) - min(finite), _LEAST)
    return middle - half, middle + half


def _inside(value: float, low: float) -> float:
    return max(value, low) if math.isfinite(value) else low


def _outside(axes: Axes, index: int, value: float, *, left: bool) -> None:
    """Tells a number at the edge that it is beyond."""
    axes.text(
        0.01 if left else 0.99,
        index,
        f"← {value:.3f}" if left else f"{value:.3f} →",
        transform=axes.get_yaxis_transform(),
        color=MUTED,
        ha="left" if left else "right",
        va="center",
        fontsize=8,
    )
