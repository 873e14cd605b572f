"""The study's figure: every seed's loss, and perplexity against context length."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from eval.common.style import INK, MUTED, PAPER, STYLE, run_colour, run_marker
from eval.small_study.questions import NONE, YARN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As in CAT's Figure 1: YaRN's temperature, and PI where positions are rotary.
SCALED = ("pi+temperature", "temperature")
OUTLIER = 4.0  # loss differences, in those of half of the models, beyond which a model is cut off


def study_figure(summary: dict[str, Any]) -> Figure:
    """Above, loss at the training length: a point for each seed, a bar at their mean. Below,
    perplexity against context length as trained and, beside it, where anything was, scaled to the
    length: the mean over seeds in a band from the smallest to the largest; NoPE is dashed."""
    models = [model for model in summary["models"] if model["seeds"]]
    with matplotlib.rc_context({**STYLE, "lines.markeredgewidth": 0.5}):
        above = 0.3 * len(models) + 0.9
        figure = Figure((9.2, above + 4.4), layout="constrained")
        scaled = _scaled(summary)
        below = ["none", "scaled"] if scaled else ["none"]
        axes = figure.subplot_mosaic([["loss"] * len(below), below], height_ratios=(above, 4.0))
        _losses(axes["loss"], summary, models)
        lengths_panel(axes["none"], summary, models, (NONE,), "positions as trained")
        axes["none"].set_ylabel("perplexity per token")
        if scaled:
            axes["scaled"].sharey(axes["none"])
            lengths_panel(axes["scaled"], summary, models, *scaled)
            axes["scaled"].tick_params(axis="y", which="both", labelleft=False)
        figure.align_titles()
        handles, labels = axes["none"].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5)
        return figure


def _scaled(summary: dict[str, Any]) -> tuple[tuple[str, ...], str] | None:
    """Return the methods of the panel beside the one of positions as trained, and its title."""
    read = {row["method"] for row in summary["rows"]}
    if read & {*SCALED}:
        return SCALED, "scaled to the length, as in CAT's Figure 1"
    if YARN in read:
        return (YARN, NONE), "rotary positions by YaRN, others as trained"
    return None


def _losses(axes: Axes, summary: dict[str, Any], models: list[dict[str, Any]]) -> None:
    found = [_values(summary, m["model"], summary["training_length"], NONE, "loss") for m in models]
    edge = _edge([statistics.fmean(values) for values in found if values])
    for index, values in enumerate(found):
        if not values:
            axes.annotate(
                "diverged", (0.01, index), xycoords=("axes fraction", "data"), va="center"
            )
            continue
        mean = statistics.fmean(values)
        if mean > edge:
            text = f"{mean:.3f} \N{BLACK RIGHT-POINTING TRIANGLE}"
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "ha": "right"}
            axes.annotate(text, (0.995, index), color=run_colour(index), **place)
            continue
        axes.plot([mean, mean], [index - 0.3, index + 0.3], color=INK, lw=1.5, zorder=2)
        style = {"color": run_colour(index), "mec": PAPER, "ms": 6.5, "alpha": 0.9, "zorder": 3}
        axes.plot(values, [index] * len(values), run_marker(index), **style)
    axes.set_yticks(range(len(models)), [seeded(summary, m) for m in models], color=INK)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.08)
    axes.set_xlabel(f"held-out loss at length {summary['training_length']:,} (nats per token)")
    panel_title(axes, "a point for each seed, bar: their mean")


def seeded(summary: dict[str, Any], model: dict[str, Any]) -> str:
    """Return a model's label, with how many seeds have a loss, where some but not all do."""
    losses = _values(summary, model["model"], summary["training_length"], NONE, "loss")
    seeds, asked = len(losses), len(summary["seeds"])
    return model["label"] if seeds in (0, asked) else f"{model['label']} ({seeds} of {asked} seeds)"


def _edge(means: list[float]) -> float:
    """End the picture of losses where one bad model does not hide the others' order."""
    if len(means) < 4:
        return float("inf")
    ordered = sorted(means)
    half = statistics.median(ordered) - ordered[0]
    return statistics.median(ordered) + OUTLIER * half


def lengths_panel(
    axes: Axes,
    summary: dict[str, Any],
    models: list[dict[str, Any]],
    methods: tuple[str, ...],
    title: str,
) -> None:
    """Perplexity against context length, under the first of some methods that a length has.

    Where a length has not all seeds, those that are left are a choice, and the point is hollow.
    """
    lengths = sorted({row["length"] for row in summary["rows"]})
    hollow = False
    for index, model in enumerate(models):
        found = [
            (length, values)
            for length in lengths
            if (values := _first(summary, model["model"], length, methods))
        ]
        x = [length for length, _ in found]
        means = [statistics.fmean(values) for _, values in found]
        bounds = [[pick(values) for _, values in found] for pick in (min, max)]
        style = {"color": run_colour(index), "marker": run_marker(index), "mec": PAPER, "lw": 1.4}
        style["ls"] = "-" if model["position_embedding"] == "rope" else "--"
        axes.fill_between(x, *bounds, color=run_colour(index), alpha=0.18, lw=0, zorder=1)
        axes.plot(x, means, label=model["label"], **style)
        partial = [i for i, (_, values) in enumerate(found) if len(values) < len(summary["seeds"])]
        if partial:
            hollow = True
            over = {**style, "mec": run_colour(index), "mfc": PAPER, "ls": "", "zorder": 3}
            axes.plot([x[i] for i in partial], [means[i] for i in partial], **over)
    axes.axvline(summary["training_length"], color=MUTED, ls=(0, (4, 3)), lw=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{length:,}" for length in lengths])
    every = [row["perplexity"] for row in summary["rows"] if row["perplexity"] is not None]
    if every and max(every) > 4 * min(every):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("context length (tokens); dashed: training length")
    panel_title(axes, f"{title}\nhollow: not of all seeds" if hollow else title)


def panel_title(axes: Axes, text: str) -> None:
    """Set a panel's title: what it shows."""
    axes.set_title(text, fontsize=9, color=MUTED, loc="left")


def _first(
    summary: dict[str, Any], model: str, length: int, methods: tuple[str, ...]
) -> list[float]:
    """The perplexity of every seed by the first method that has any."""
    each = (_values(summary, model, length, method, "perplexity") for method in methods)
    return next(filter(None, each), [])


def _values(summary: dict[str, Any], model: str, length: int, method: str, key: str) -> list[float]:
    """The value of every seed."""
    return [
        row[key]
        for row in summary["rows"]
        if (row["model"], row["length"], row["method"]) == (model, length, method)
        and row[key] is not None
    ]
