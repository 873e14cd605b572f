"""Draw sweeps: perplexity over dense attention's by what is read; and the figure of all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

from eval.common.style import MUTED, PAPER, STYLE, legend_key, plain_label, run_colour, run_marker
from eval.landmark.choices import SELECTORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Records also have two selectors that are gone.
_DRAWN = (*SELECTORS, "quest", "indexer")
PANEL = (3.6, 3.0)  # inches
LONG_LABEL = 24  # characters: two columns of longer ones are wider than a panel
# Names of the columns for people.
AXES = {"share": "keys read, of all", "bytes": "bytes read by the last token, of dense attention's"}


def sweep_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A row of panels for each model, at the largest length: by keys, and by bytes.

    Every selector has a colour; points of one block size are joined.

    Args:
        rows: as `eval.landmark.sweep` gives them.
    """
    length = max(row["length"] for row in rows)
    shown = [row for row in rows if row["length"] == length and row["block"] is not None]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    present = [name for name in _DRAWN if any(row["select"] == name for row in shown)]
    with matplotlib.rc_context(STYLE):
        size = (2 * PANEL[0], PANEL[1] * len(labels) + 0.4)
        figure = Figure(size, layout="constrained")
        panels = figure.subplots(len(labels), 2, squeeze=False, sharey="row")
        for of_label, label in zip(panels, labels, strict=True):
            own = [row for row in shown if row["label"] == label]
            for axes, kind in zip(of_label, AXES, strict=True):
                _panel(axes, own, kind)
            of_label[0].set_title(plain_label(f"{label}, {length:,} tokens"), loc="left")
        keys = [legend_key(name, _DRAWN.index(name)) for name in present]
        figure.legend(handles=keys, loc="outside lower center", ncols=4)
        return figure


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    for name, block in dict.fromkeys((row["select"], row["block"]) for row in rows):
        line = [row for row in rows if (row["select"], row["block"]) == (name, block)]
        line.sort(key=lambda row: row["top_k"])
        index = _DRAWN.index(name)
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
    """Scale what is lost: losses of bad choices are hundreds of times those of good ones."""
    axes.set_yscale("symlog", linthresh=1.0)
    ticks = SymmetricalLogLocator(base=10, linthresh=1.0, subs=(1.0, 2.0, 5.0))
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _read(row: Mapping[str, Any], kind: str) -> float:
    if kind == "share":
        return row["share"]
    return (row["selector_bytes"] + row["key_value_bytes"]) / row["dense_bytes"]


def summary_figure(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw what `eval.landmark.summary` found, a panel for each part that there is."""
    panels = {
        name: draw
        for name, draw in (
            ("needles", _needle_panel),
            ("retrieval", _retrieval_panel),
            ("perplexity", _perplexity_panel),
            ("decoding", _decoding_panel),
        )
        if found[name]
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure((PANEL[0] * max(1, len(panels)), PANEL[1] + 1.4), layout="constrained")
        every = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
        for axes, (name, draw) in zip(every, panels.items(), strict=False):
            draw(axes, found[name])
            # Below: as many lines as selectors and models would lie on the points.
            long = max(map(len, axes.get_legend_handles_labels()[1]), default=0) > LONG_LABEL
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
            axes.legend(fontsize=7, ncols=1 if long else 2, **place)
        return figure


def _needle_panel(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    for index, series in enumerate(dict.fromkeys(point["series"] for point in points)):
        own = [point for point in points if point["series"] == series]
        values = [point["accuracy"] for point in own]
        axes.errorbar(
            [point["length"] for point in own],
            values,
            yerr=_reaches(values, own),
            color=run_colour(index),
            marker=run_marker(index),
            linewidth=1.0,
            label=plain_label(series),
        )
    axes.axhline(points[0]["chance"], color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("tokens of the haystack and its questions")
    axes.set_ylabel("needles found")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _reaches(
    values: Sequence[float], points: Sequence[Mapping[str, Any]], factor: float = 1.0
) -> list[list[float]]:
    """Return how far the points' ranges, times `factor`, reach below and above the values."""
    low, high = ([factor * point["range"][side] for point in points] for side in (0, 1))
    return [
        [value - x for value, x in zip(values, low, strict=True)],
        [x - value for value, x in zip(values, high, strict=True)],
    ]


def _retrieval_panel(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    for index, series in enumerate(dict.fromkeys(point["series"] for point in points)):
        own = [point for point in points if point["series"] == series]
        x, colour = [point["x"] for point in own], run_colour(index)
        axes.plot(
            x,
            [point["retrieved"] for point in own],
            linestyle="",
            marker=run_marker(index),
            color=colour,
            label=plain_label(series),
        )
        law = {"label": "the law"} if index == 0 else {}
        axes.plot(x, [point["predicted"] for point in own], color=colour, linewidth=1.0, **law)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("SNR² / (2 b ln(m / k))")
    axes.set_ylabel("the match's block is chosen")


def _perplexity_panel(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    all_series = list(dict.fromkeys(point["series"] for point in points))
    for series, select in dict.fromkeys((p["series"], p["select"]) for p in points):
        own = [p for p in points if (p["series"], p["select"]) == (series, select)]
        own.sort(key=lambda point: point["top_k"])
        index, number = _DRAWN.index(select), all_series.index(series)
        values = [100 * point["over_dense"] for point in own]
        axes.errorbar(
            [point["share"] for point in own],
            values,
            yerr=_reaches(values, own, 100),
            color=run_colour(index),
            marker=run_marker(index),
            linestyle=("-", "--", ":", "-.")[number % 4],
            linewidth=1.0,
            label=plain_label(select if len(all_series) == 1 else f"{select}, {series}"),
        )
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xscale("log", base=2)
    _percent_axis(axes)
    axes.set_xlabel(f"keys read, of all, {points[0]['length']:,} tokens, b = {points[0]['block']}")
    axes.set_ylabel("perplexity over dense (%)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _decoding_panel(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    kinds = dict.fromkeys((p["model"], p["part"], p["attention"]) for p in points)
    names = list(dict.fromkeys(model for model, _, _ in kinds))
    for model, part, attention in kinds:
        own = [p for p in points if (p["model"], p["part"]) == (model, part)]
        own = [point for point in own if point["attention"] == attention]
        index = 2 * names.index(model) + (attention == "landmark")
        of_model = f"{model}, " if len(names) > 1 else ""
        axes.plot(
            [point["context"] for point in own],
            [point["ms"] for point in own],
            color=run_colour(index),
            marker=run_marker(index),
            linestyle="-" if part == "model" else ":",
            label=plain_label(f"{of_model}{attention}, {part}"),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context (random keys and values)")
    axes.set_ylabel("ms a token")
