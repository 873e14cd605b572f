"""Draw the losses of runs against the tokens that they trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eval.common.style import (
    MANY_RUNS,
    MUTED,
    PAPER,
    STYLE,
    WIDE,
    legend_key,
    run_colour,
    run_marker,
    short_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def loss_figure(
    runs: Mapping[str, Mapping[str, Any]],
    unigram_loss: float | None,
    size: tuple[float, float] = WIDE,
) -> Figure:
    """Training loss (smoothed, thin) and held-out loss (points) against tokens.

    Args:
        runs: label -> {"train": [(tokens, nats)], "validation": [(tokens, nats)]}.
        unigram_loss: nats per token of a unigram model, drawn as the reference.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        seen, must_show = [], []
        for index, curves in enumerate(runs.values()):
            colour = run_colour(index)
            tokens, losses = np.array(curves["train"], dtype=float).reshape(-1, 2).T
            smooth = smoothed(losses)
            axes.plot(tokens, smooth, color=colour, lw=0.9, alpha=0.55, zorder=2)
            points = np.array(curves["validation"], dtype=float).reshape(-1, 2)
            axes.plot(*points.T, marker=run_marker(index), color=colour, mec=PAPER, zorder=3)
            seen += [*smooth, *points[:, 1]]
            must_show += [*smooth[-1:], *points[:, 1]]
        if unigram_loss is not None:
            must_show.append(unigram_loss)
        _loss_limits(axes, seen, must_show if unigram_loss is not None else seen)
        if unigram_loss is not None:
            _reference(axes, unigram_loss, f"unigram model {unigram_loss:.2f}")
        axes.set_xlabel("training tokens")
        axes.set_ylabel("loss (nats per token)")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
        axes.xaxis.set_major_locator(MaxNLocator(5 if size[0] > 5 else 4))
        keys = [legend_key(label, index) for index, label in enumerate(runs)]
        if len(runs) > MANY_RUNS:
            columns = 4 if size[0] > 5 else 2
            figure.legend(handles=keys, loc="outside lower center", ncols=columns, fontsize=8)
        else:
            # Below the reference's words; above it where all losses are.
            is_below = unigram_loss is not None and unigram_loss < min(seen, default=unigram_loss)
            place = {"loc": "center right"} if is_below else {"bbox_to_anchor": (1, 0.88)}
            axes.legend(handles=keys, **{"loc": "upper right"} | place)
        return figure


def smoothed(values: np.ndarray) -> np.ndarray:
    """A mean over the last 3% of the values (at least 20), fewer at the start."""
    width = max(20, len(values) * 3 // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - width, 0)
    return (sums[stops] - sums[starts]) / np.maximum(stops - starts, 1)


def _loss_limits(axes: Axes, losses: list[float], must_show: list[float]) -> None:
    """Shows what was learned: the first training steps may leave the picture at its top."""
    if losses:
        low, top = min(*losses, *must_show), max(must_show)  # a reference may be below all losses
        axes.set_ylim(low - 0.06 * (top - low), top + 0.14 * (top - low))


def _reference(axes: Axes, value: float, text: str) -> None:
    axes.axhline(value, color=MUTED, ls=(0, (4, 3)), lw=1)
    axes.annotate(
        text,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=MUTED,
        fontsize=8,
    )
