"""The comparison's picture: four panels."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from eval.common.style import INK, MUTED, PAPER, STYLE, legend_key, run_colour, run_marker
from eval.common.style import short_count as short
from eval.rivals.text_recall import BINS, RECALL
from eval.small_study.figure import lengths_panel, panel_title, seeded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCALED = "yarn"  # drawn beside positions as trained, where there are any
SHOWN = 0.4  # of the span of losses, above their lowest end, that panel (a) shows
_LARGEST = 700.0  # nats whose exponential is a number


def rivals_figure(summary: dict[str, Any]) -> Figure:
    """Loss against training tokens; perplexity against context length; loss on what the window
    shows, by how often training did, minus the base's; perplexity of recalled tokens against bytes
    of decoding state."""
    models = [model for model in summary["models"] if model["seeds"]]
    with matplotlib.rc_context({**STYLE, "lines.markeredgewidth": 0.5, "lines.markersize": 4.5}):
        figure = Figure((10.0, 8.8), layout="constrained")
        axes = figure.subplot_mosaic([["tokens", "lengths"], ["counts", "frontier"]])
        _tokens(axes["tokens"], models)
        _by_length(axes["lengths"], summary, models)
        _by_count(axes["counts"], summary, models)
        _frontier(axes["frontier"], summary, models)
        handles = [legend_key(seeded(summary, m), index) for index, m in enumerate(models)]
        for handle, model in zip(handles, models, strict=True):
            handle.set_linestyle(_dashes(model))
        figure.legend(
            handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, handlelength=2.6
        )
        return figure


def _dashes(model: dict[str, Any]) -> str:
    """As in `lengths_panel`: there are more rows than colours."""
    return "-" if model["position_embedding"] == "rope" else "--"


def _style(index: int, model: dict[str, Any]) -> dict[str, Any]:
    style = {"color": run_colour(index), "marker": run_marker(index), "mec": PAPER, "lw": 1.3}
    return style | {"ls": _dashes(model)}


def _tokens(axes: Axes, models: list[dict[str, Any]]) -> None:
    ends, every = [], []
    for index, model in enumerate(models):
        curves = [curve for curve in model["validation"].values() if curve]
        shared = set.intersection(*({tokens for tokens, _ in c} for c in curves)) if curves else ()
        x = sorted(shared)
        if not x:
            continue
        values = [[dict(map(tuple, curve))[tokens] for curve in curves] for tokens in x]
        means = [statistics.fmean(found) for found in values]
        bounds = [[pick(found) for found in values] for pick in (min, max)]
        axes.fill_between(x, *bounds, color=run_colour(index), alpha=0.18, lw=0, zorder=1)
        axes.plot(x, means, **_style(index, model))
        ends.append(means[-1])
        every += means
    if ends:
        # The first steps are alike, and would leave the ends no room.
        low, span = min(ends), max(every) - min(ends)
        top = max(max(ends), low + SHOWN * span)
        axes.set_ylim(low - 0.03 * (top - low or 1), top + 0.03 * (top - low or 1))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value) if value else "0"))
    axes.set_xlabel("training tokens")
    axes.set_ylabel("held-out loss (nats per token)")
    panel_title(axes, "(a) validation; mean over seeds, band: smallest to largest")


def _by_length(axes: Axes, summary: dict[str, Any], models: list[dict[str, Any]]) -> None:
    cells = {(c["model"], c["method"], c["length"]): c["perplexity"] for c in summary["cells"]}
    for index, model in enumerate(models):
        found = [
            (length, value["mean"])
            for (name, method, length), value in cells.items()
            if (name, method) == (model["model"], SCALED) and value
        ]
        style = {"color": run_colour(index), "ls": ":", "lw": 1.2, "zorder": 1.5}
        if found:
            axes.plot(*zip(*sorted(found), strict=True), **style)
    title = "(b) as trained; dotted: YaRN; dashed: rows without positions"
    lengths_panel(axes, summary, models, ("none",), title)
    axes.set_ylabel("perplexity per token")


def _by_count(axes: Axes, summary: dict[str, Any], models: list[dict[str, Any]]) -> None:
    recall = summary["recall"]
    length = recall["length"]
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for row in recall["rows"]:
        if row["length"] == length and row["loss"] is not None:
            losses.setdefault((row["model"], row["slice"]), {})[row["seed"]] = row["loss"]
    for index, model in enumerate(models):
        x, means, below, above = [], [], [], []
        for place, name in enumerate(BINS):
            ours = losses.get((model["model"], name), {})
            base = losses.get((summary["base"], name), {})
            values = [ours[seed] - base[seed] for seed in ours.keys() & base.keys()]
            if values:
                # Side by side, so that ranges over seeds can be told apart.
                x.append(place + 0.05 * (index - len(models) / 2))
                means.append(statistics.fmean(values))
                below.append(means[-1] - min(values))
                above.append(max(values) - means[-1])
        if x:
            axes.errorbar(x, means, yerr=[below, above], elinewidth=0.8, **_style(index, model))
    axes.axhline(0, color=MUTED, lw=1, zorder=0)
    tokens = {row["slice"]: row["tokens"] for row in recall["bigram"] if row["length"] == length}
    axes.set_xticks(range(len(BINS)), [f"{name}\n{short(tokens[name])}" for name in BINS])
    axes.set_xlabel("times that the pair stands in training text; below: tokens scored")
    labels = {model["model"]: model["label"] for model in models}
    base = labels.get(summary["base"], summary["base"])
    axes.set_ylabel(f"loss minus {base}'s (nats per token)")
    panel_title(axes, f"(c) pairs seen earlier in a window of {length:,}; bars: range over seeds")


def _frontier(axes: Axes, summary: dict[str, Any], models: list[dict[str, Any]]) -> None:
    length = summary["recall"]["length"]
    perplexities = recall_perplexities(summary, length)
    for index, model in enumerate(models):
        values = perplexities.get(model["model"])
        if not values:
            continue
        x, mean = model["state_bytes"][str(length)], statistics.fmean(values)
        axes.plot([x, x], [min(values), max(values)], color=run_colour(index), lw=1.2)
        axes.plot([x], [mean], ms=7, **_style(index, model))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", which="minor", labelsize=8, colors=INK)
    axes.grid(True, which="both", axis="y")
    axes.set_xlabel(f"decoding state at {length:,} tokens")
    axes.set_ylabel("perplexity of recalled rare pairs")
    panel_title(axes, f"(d) window of {length:,}, as trained; bars: range over seeds")


def recall_perplexities(
    summary: dict[str, Any], length: int, name: str = RECALL
) -> dict[str, list[float]]:
    """Gather a slice's perplexity of every seed: model -> values."""
    found: dict[str, list[float]] = {}
    for row in summary["recall"]["rows"]:
        if (row["length"], row["slice"]) == (length, name) and row["loss"] is not None:
            found.setdefault(row["model"], []).append(math.exp(min(row["loss"], _LARGEST)))
    return found


def _bytes(value: float) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
