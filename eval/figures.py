"""The pictures: drawn once, saved as PNG and SVG, and as SVG that follows a page's colours.

Every run keeps one colour and one marker in all pictures, and lines differ by marker as well as
by colour, so that they can be told apart without seeing colours. Colours in the SVG of a page
are CSS variables (see eval/report.css), which is how one drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from cat_lm.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

# After Okabe and Ito: distinct under the common kinds of colour blindness, in print and on screen.
RUN_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8a6d00"),
    *("#56708a", "#3fa7d6", "#c22f3d", "#4d4d4d", "#7bb661"),
)
# Of another number than the colours, so that their pairs repeat late.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
INK, MUTED, GRID, PAPER = "#1c2024", "#5f6871", "#e2e5e9", "#ffffff"
NEGATIVE, POSITIVE = "#2166ac", "#b2540b"

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
        for index, (label, curves) in enumerate(runs.items()):
            colour = run_colour(index)
            tokens, losses = np.array(curves["train"], dtype=float).reshape(-1, 2).T
            smooth = smoothed(losses)
            axes.plot(tokens, smooth, color=colour, lw=0.9, alpha=0.55, zorder=2)
            points = np.array(curves["validation"], dtype=float).reshape(-1, 2)
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(*points.T, marker=marker, color=colour, label=label, mec=PAPER, zorder=3)
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
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.88))
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
            name = label if method == "none" else f"{label}, {method}"
            _length_line(axes, line, order.index(label), name)
        _length_axes(axes, rows, values)
        axes.legend(loc="best")
        return figure


def filters_figure(filters: Mapping[str, np.ndarray], size: tuple[float, float] = WIDE) -> Figure:
    """The taps of every layer and head as a heat map, a panel for each stream.

    The colour scale ends at the largest tap behind lag 0, because lag 0 (the token itself) is
    near 1 in a model that started at the identity and would hide all others.

    Args:
        filters: stream (q, k, v) -> float [layers, heads, W], lag 0 first.
    """
    layers, heads, window = next(iter(filters.values())).shape
    across = size[0] > 5
    panel = min(max(1.6, layers * heads * 0.055), 8.0)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        height = panel + 0.9 if across else (panel * 0.8 + 0.5) * len(filters) + 0.6
        figure = Figure((size[0], height), layout="constrained")
        grid = (1, len(filters)) if across else (len(filters), 1)
        panels = list(figure.subplots(*grid, sharey=True, squeeze=False).flat)
        limit = filter_scale(filters)
        for axes, (stream, taps) in zip(panels, filters.items(), strict=True):
            image = axes.imshow(
                taps.reshape(layers * heads, window),
                cmap=_diverging_map(),
                vmin=-limit,
                vmax=limit,
                aspect="auto",
                interpolation="none",
                extent=(-0.5, window - 0.5, layers * heads - 0.5, -0.5),
            )
            for layer in range(1, layers):
                axes.axhline(layer * heads - 0.5, color=MUTED, lw=0.5)
            axes.set_title(f"{stream} filters", fontsize=9, color=INK)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.spines[:].set_visible(True)
            axes.tick_params(length=0)
            if axes.get_subplotspec().is_first_col():
                axes.set_ylabel("layer")
            if axes.get_subplotspec().is_last_row():
                axes.set_xlabel("lag (tokens back)")
        step = max(1, layers // 12)
        axes.set_yticks(
            [(layer + 0.5) * heads - 0.5 for layer in range(0, layers, step)],
            [str(layer) for layer in range(0, layers, step)],
        )
        _colour_key(figure, panels, image, across)
        return figure


def filter_scale(filters: Mapping[str, np.ndarray]) -> float:
    """The largest |tap| behind lag 0 (of all taps where W = 1)."""
    behind = [np.abs(taps[..., 1:] if taps.shape[-1] > 1 else taps) for taps in filters.values()]
    return max(float(max(taps.max() for taps in behind)), 1e-8)


def save_figure(figure: Figure, stem: Path | str) -> None:
    """Writes `stem`.png and `stem`.svg, each whole or not at all."""
    stem = Path(stem)
    # The hash salt makes the SVG's ids, and so its bytes, the same every time.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": stem.name}):
        with replacing(stem.with_suffix(".png"), "wb") as file:
            figure.savefig(file, format="png", dpi=200)
        with replacing(stem.with_suffix(".svg"), "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})


def page_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an inline SVG element whose colours are the page's CSS variables.

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
    names = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
    names |= {colour: f"run-{index}" for index, colour in enumerate(RUN_COLOURS)}
    for colour, variable in names.items():
        svg = svg.replace(colour, f"var(--{variable})")
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


def _length_line(axes: Axes, line: list[Mapping[str, Any]], index: int, name: str) -> None:
    # With bars, side by side, so that they do not hide each other.
    bars_drawn = has_error_bars(line)
    lengths = [row["length"] * (1.02**index if bars_drawn else 1) for row in line]
    values = np.array([row["perplexity"] for row in line])
    colour = run_colour(index)
    marker = MARKERS[index % len(MARKERS)]
    axes.plot(lengths, values, color=colour, marker=marker, mec=PAPER, label=name, zorder=3)
    if bars_drawn:
        # An error of e nats in the loss is a factor exp(e) in perplexity.
        errors = np.array([row["standard_error"] for row in line])
        bars = [values * (1 - np.exp(-errors)), values * (np.exp(errors) - 1)]
        axes.errorbar(lengths, values, bars, fmt="none", ecolor=colour, elinewidth=0.9, alpha=0.6)


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


def _diverging_map() -> ListedColormap:
    """Blue below zero, orange above, nothing at zero: right on light and on dark pages."""
    values = np.linspace(-1, 1, 257)
    strength = np.abs(values) ** 0.8
    colours = np.where((values < 0)[:, None], to_rgb(NEGATIVE), to_rgb(POSITIVE))
    return ListedColormap(np.concatenate([colours, strength[:, None]], axis=1))


def _colour_key(figure: Figure, panels: Sequence[Axes], image: AxesImage, across: bool) -> None:
    place = {"shrink": 0.8, "aspect": 30} if across else {"location": "top", "aspect": 30}
    bar = figure.colorbar(image, ax=list(panels), pad=0.02, extend="both", **place)
    bar.outline.set_edgecolor(MUTED)
    bar.outline.set_linewidth(0.5)
    # As vectors, the neighbouring steps of the key would show seams.
    bar.solids.set_rasterized(True)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.locator = MaxNLocator(4)
