"""The pictures: drawn once, saved as PNG and SVG, and as SVG inside a page.

Every run keeps one colour and one marker in all pictures, and lines differ by marker as well as
by colour, so that they can be told apart without seeing colours. Methods of scaling positions
differ by the style of the line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from cat_lm.io.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# After Okabe and Ito: distinct under the common kinds of colour blindness, in print and on screen.
RUN_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8a6d00"),
    *("#56708a", "#3fa7d6", "#c22f3d", "#4d4d4d", "#7bb661"),
)
# Of another number than the colours, so that their pairs repeat late.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
INK, MUTED, GRID, PAPER = "#1c2024", "#5f6871", "#e2e5e9", "#ffffff"

METHOD_LINES = {"none": "-", "pi": ":", "pi+temperature": "--", "yarn": "-.", "temperature": "--"}

MANY_RUNS = 5  # above which the legend stands below the picture
MIN_GROUPS = 20  # documents or windows below which no error bar is drawn
WIDE, NARROW = (7.4, 3.7), (3.8, 3.3)  # inches: for a desktop column and for a phone
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
}


def run_colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def run_marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def plain_label(text: str) -> str:
    """`text` to matplotlib, which would read what stands between dollars as a formula."""
    return text.replace("$", r"\$")


def legend_key(label: str, index: int) -> Line2D:
    """What a legend shows for a run.

    Legends take these, not the lines themselves: among those, labels that begin with an underscore
    are left out.
    """
    style = {"color": run_colour(index), "marker": run_marker(index), "mec": PAPER}
    return Line2D([], [], label=plain_label(label), **style)


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
            axes.legend(handles=keys, loc="upper right", bbox_to_anchor=(1, 0.88))
        return figure


def length_figure(
    rows: Sequence[Mapping[str, Any]],
    size: tuple[float, float] = WIDE,
    order: Sequence[str] | None = None,
) -> Figure:
    """Perplexity against context length, one line for each model and method.

    Args:
        rows: as eval.length_sweep gives them.
        order: labels in the order that decides their colours; default: as they come.
    """
    order = list(order or dict.fromkeys(row["label"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        values = []
        for label, method in dict.fromkeys((row["label"], row["method"]) for row in rows):
            line = [r for r in rows if (r["label"], r["method"]) == (label, method)]
            line = sorted((r for r in line if r["perplexity"] is not None), key=_length)
            values += [row["perplexity"] for row in line]
            _length_line(axes, line, order.index(label), method)
        _length_axes(axes, rows, values)
        _length_legends(axes, order, list(dict.fromkeys(row["method"] for row in rows)), size)
        return figure


def save_figure(figure: Figure, stem: Path | str) -> None:
    """Writes `stem`.png and `stem`.svg, each whole or not at all."""
    stem = Path(stem)
    # Not `with_suffix`: a name such as filters_lr0.001 would lose what follows its point.
    # The hash salt makes the SVG's ids, and so its bytes, the same every time.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": stem.name}):
        with replacing(stem.with_name(f"{stem.name}.png"), "wb") as file:
            figure.savefig(file, format="png", dpi=200)
        with replacing(stem.with_name(f"{stem.name}.svg"), "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})


def page_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an inline SVG element in the page's font.

    Args:
        name: unique on the page; keeps the ids of two drawings apart.
        description: what it shows, for those who cannot see it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The font is the page's; only sizes stay.
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r' width="[^"]*pt" height="[^"]*pt"', "", svg, count=1).replace(
        "<svg ", f'<svg role="img" aria-label="{label}" ', 1
    )


def smoothed(values: np.ndarray) -> np.ndarray:
    """A mean over the last 3% of the values (at least 20), fewer at the start."""
    width = max(20, len(values) * 3 // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - width, 0)
    return (sums[stops] - sums[starts]) / np.maximum(stops - starts, 1)


def short_count(value: float) -> str:
    """12300000 -> 12.3M."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def has_error_bars(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are enough groups for a standard error to mean something."""
    return all(row["standard_error"] is not None and row["groups"] >= MIN_GROUPS for row in rows)


def _length(row: Mapping[str, Any]) -> int:
    return row["length"]


def _length_line(axes: Axes, line: list[Mapping[str, Any]], index: int, method: str) -> None:
    # With bars, side by side, so that they do not hide each other.
    bars_drawn = has_error_bars(line)
    lengths = [row["length"] * (1.02**index if bars_drawn else 1) for row in line]
    values = np.array([row["perplexity"] for row in line])
    colour = run_colour(index)
    plain = method == "none"
    axes.plot(
        lengths,
        values,
        color=colour,
        ls=METHOD_LINES.get(method, (0, (1, 3))),
        lw=1.8 if plain else 1.3,
        marker=run_marker(index),
        ms=5 if plain else 4,
        mec=PAPER if plain else colour,
        mfc=colour if plain else PAPER,
        zorder=4 if plain else 3,
    )
    if bars_drawn:
        # An error of e nats in the loss is a factor exp(e) in perplexity.
        errors = np.array([row["standard_error"] for row in line])
        bars = [values * (1 - np.exp(-errors)), values * (np.exp(errors) - 1)]
        axes.errorbar(lengths, values, bars, fmt="none", ecolor=colour, elinewidth=0.9, alpha=0.6)


def _length_legends(
    axes: Axes, labels: Sequence[str], methods: Sequence[str], size: tuple[float, float]
) -> None:
    """Runs by colour and marker; where there are several methods, these by the line's style."""
    handles = [legend_key(label, index) for index, label in enumerate(labels)]
    if len(methods) > 1:
        handles += [
            Line2D(
                [],
                [],
                color=MUTED,
                ls=METHOD_LINES.get(method, (0, (1, 3))),
                lw=1.3,
                label="not scaled" if method == "none" else method,
            )
            for method in methods
        ]
    if len(handles) <= MANY_RUNS:
        axes.legend(handles=handles, loc="best")
        return
    columns = 4 if size[0] > 5 else 2
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)


def _length_axes(axes: Axes, rows: Sequence[Mapping[str, Any]], values: list[float]) -> None:
    trained = {row["training_length"] for row in rows if row["training_length"]}
    lengths = sorted({row["length"] for row in rows})
    for length in trained:
        axes.axvline(length, color=MUTED, ls=(0, (4, 3)), lw=1)
        axes.annotate(
            "training length",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            va="top",
            color=MUTED,
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    one = next(iter(trained)) if len(trained) == 1 else None
    times = "\N{MULTIPLICATION SIGN}"
    axes.set_xticklabels(
        [f"{length:,}" + (f"\n{length / one:g}{times}" if one else "") for length in lengths]
    )
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("perplexity per token")
    if values and max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.06, y=0.15)


def _loss_limits(axes: Axes, losses: list[float], must_show: list[float]) -> None:
    """Shows what was learned: the first training steps may leave the picture at its top."""
    if losses:
        low, top = min(losses), max(must_show)
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
