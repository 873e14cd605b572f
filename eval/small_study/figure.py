"""The study's figure: every seed's loss, and perplexity against context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.figures import INK, MUTED, PAPER, STYLE, run_colour, run_marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def study_figure(summary: dict[str, Any]) -> Figure:
    """Left: loss at the training length, a point for each seed, a bar at the mean. Right:
    perplexity without scaling against context length, the mean over seeds in a band from the
    smallest to the largest."""
    models = [model for model in summary["models"] if model["seeds"]]
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.6, 0.42 * len(models) + 1.4), layout="constrained")
        figure.set_size_inches(9.6, max(4.2, 0.42 * len(models) + 1.0))
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        _losses(left, summary, models)
        _lengths(right, summary, models)
        return figure


def _losses(axes: Axes, summary: dict[str, Any], models: list[dict[str, Any]]) -> None:
    for index, model in enumerate(models):
        values = _values(summary, model["model"], summary["training_length"], "loss")
        if not values:
            axes.annotate(
                "diverged", (0.02, index), xycoords=("axes fraction", "data"), va="center"
            )
            continue
        mean = sum(values) / len(values)
        axes.plot([mean, mean], [index - 0.32, index + 0.32], color=INK, lw=1.6, zorder=2)
        axes.plot(
            values,
            [index] * len(values),
            run_marker(index),
            color=run_colour(index),
            mec=PAPER,
            ms=7,
            zorder=3,
        )
    axes.set_yticks(range(len(models)), [model["label"] for model in models], color=INK)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"held-out loss at length {summary['training_length']:,} (nats per token)")
    axes.set_title("each point a seed, bar: mean", fontsize=9, color=MUTED, loc="left")


def _lengths(axes: Axes, summary: dict[str, Any], models: list[dict[str, Any]]) -> None:
    lengths = sorted({row["length"] for row in summary["rows"]})
    every = []
    for index, model in enumerate(models):
        found = [
            (length, values)
            for length in lengths
            if (values := _values(summary, model["model"], length, "perplexity"))
        ]
        if not found:
            continue
        x = [length for length, _ in found]
        means = [sum(values) / len(values) for _, values in found]
        colour = run_colour(index)
        bounds = [[pick(values) for _, values in found] for pick in (min, max)]
        axes.fill_between(x, *bounds, color=colour, alpha=0.15, lw=0, zorder=1)
        axes.plot(x, means, color=colour, marker=run_marker(index), mec=PAPER, label=model["label"])
        every += means
    if not every:
        return
    axes.axvline(summary["training_length"], color=MUTED, ls=(0, (4, 3)), lw=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{length:,}" for length in lengths])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("context length (tokens); dashed: training length")
    axes.set_ylabel("perplexity per token, positions not scaled")
    axes.set_title(
        "mean over seeds, band: smallest to largest", fontsize=9, color=MUTED, loc="left"
    )
    axes.legend(fontsize=8)


def _values(summary: dict[str, Any], model: str, length: int, key: str) -> list[float]:
    place = (model, length, "none")
    return [
        row[key]
        for row in summary["rows"]
        if (row["model"], row["length"], row["method"]) == place and row[key] is not None
    ]
