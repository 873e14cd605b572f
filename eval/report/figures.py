"""Draw what the report shows of runs: losses against tokens, and learned convolution filters.

A row of every heat map of filters is a head, layers from top to bottom. The columns depend on the
kind of convolution:

    head        the taps of the head's filter, lag 0 (the token itself) first
    depthwise   the mean over the head's channels of each tap; below, their standard deviation
    multihead   the taps that a head has for its own input; below, for each head it reads from, the
                Euclidean norm of the taps over all lags
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eval.common.filters import Filters, head_norms, own_taps
from eval.common.style import (
    INK,
    LAGS,
    MANY_RUNS,
    MUTED,
    PAPER,
    STYLE,
    WIDE,
    diverging_map,
    legend_key,
    run_colour,
    run_marker,
    short_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

HEADS = "reads from head"


def loss_figure(
    runs: Mapping[str, Mapping[str, Any]],
    unigram_loss: float | None,
    size: tuple[float, float] = WIDE,
) -> Figure:
    """Draw training loss (smoothed, thin) and held-out loss (points) against tokens.

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
        if seen:
            # The first training steps may leave the picture at its top, and a reference may be
            # below all losses.
            shown = must_show if unigram_loss is not None else seen
            low, top = min(*seen, *shown), max(shown)
            axes.set_ylim(low - 0.06 * (top - low), top + 0.14 * (top - low))
        if unigram_loss is not None:
            axes.axhline(unigram_loss, color=MUTED, ls=(0, (4, 3)), lw=1)
            how = {"ha": "right", "va": "bottom", "color": MUTED, "fontsize": 8}
            how |= {"xytext": (-2, 2), "textcoords": "offset points"}
            place = {"xy": (1, unigram_loss), "xycoords": ("axes fraction", "data")}
            axes.annotate(f"unigram model {unigram_loss:.2f}", **place, **how)
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
    """Return means over the last 3% of the values (at least 20), fewer at the start."""
    width = max(20, len(values) * 3 // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - width, 0)
    return (sums[stops] - sums[starts]) / np.maximum(stops - starts, 1)


@dataclass(frozen=True)
class View:
    """One heat map of every stream.

    Attributes:
        title: the meaning of the colours.
        values: stream -> [layers, heads, columns].
        columns: the meaning of the columns.
        limit: the value at which the colours end.
    """

    title: str
    values: dict[str, np.ndarray]
    columns: str
    limit: float


def views(filters: Filters) -> list[View]:
    """Return the heat maps that show `filters`, the first always of taps by lag."""
    taps, axes = own_taps(filters), filters.kind.filter_axes
    title = "filter taps, mean over channels" if "D" in axes else "filter taps"
    title = "taps for the head's own input" if filters.kind.mixes_heads else title
    # Lag 0 is near 1 in a model that started at the identity and would hide all others.
    shown = [_view(title, taps, LAGS, [t[..., 1:] for t in taps.values()])]
    if "D" in axes:
        channels = 1 + axes.index("D")
        spread = {stream: taps.std(axis=channels) for stream, taps in filters.streams.items()}
        if not filters.kind.mixes_heads and "H" in axes:
            shown.append(_view("their standard deviation over channels", spread, LAGS, []))
    if filters.kind.mixes_heads:
        norms = head_norms(filters)
        # A head's own input has a norm near 1 for the same reason as lag 0.
        others = [values[:, ~np.eye(values.shape[1], dtype=bool)] for values in norms.values()]
        shown.append(_view("norm over all lags, for each head read from", norms, HEADS, others))
    return shown


def _view(
    title: str, values: dict[str, np.ndarray], columns: str, scale: Sequence[np.ndarray]
) -> View:
    # The colours end at the largest of `scale` or, where that is empty, of all values.
    scale = [part for part in scale if part.size] or list(values.values())
    limit = max(max(float(np.abs(part).max()) for part in scale), 1e-8)
    return View(title, values, columns, limit)


def filters_figure(filters: Filters, size: tuple[float, float] = WIDE) -> Figure:
    """Draw a row of panels for each view, a panel for each stream.

    On a narrow picture, where three panels do not fit side by side, they stand below each other.
    """
    shown = views(filters)
    across = size[0] > 5
    streams = list(filters.streams)
    layers, heads = next(iter(shown[0].values.values())).shape[:2]
    panel = min(max(1.5, layers * heads * 0.055), 7.0)
    rows = len(shown) if across else len(shown) * len(streams)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure((size[0], rows * (panel * (1 if across else 0.8) + 0.75)))
        figure.set_layout_engine("constrained", h_pad=0.06)
        parts = np.atleast_1d(figure.subfigures(len(shown), 1))
        for part, view in zip(parts, shown, strict=True):
            grid = (1, len(streams)) if across else (len(streams), 1)
            panels = list(part.subplots(*grid, sharey=True, squeeze=False).flat)
            for axes, stream in zip(panels, streams, strict=True):
                image = _heat_map(axes, view, stream)
            panels[0].set_yticks(range(0, layers, max(1, layers // 12)))
            part.suptitle(view.title, fontsize=9, color=MUTED, x=0.01, ha="left")
            _colour_key(part, panels, image, view, across)
        return figure


def _heat_map(axes: Axes, view: View, stream: str) -> AxesImage:
    values = view.values[stream]
    layers, heads, columns = values.shape
    image = axes.imshow(
        values.reshape(layers * heads, columns),
        cmap=diverging_map(),
        vmin=-view.limit,
        vmax=view.limit,
        aspect="auto",
        interpolation="none",
        # A layer is 1 high in every panel: keys and values may have fewer heads than queries.
        extent=(-0.5, columns - 0.5, layers - 0.5, -0.5),
    )
    for layer in range(1, layers):
        axes.axhline(layer - 0.5, color=MUTED, lw=0.5)
    axes.set_title(stream, fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.spines[:].set_visible(True)
    axes.tick_params(length=0)
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("layer")
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel(view.columns)
    return image


def _colour_key(
    figure: Figure, panels: Sequence[Axes], image: AxesImage, view: View, across: bool
) -> None:
    place = {"shrink": 0.8, "aspect": 25} if across else {"location": "top", "aspect": 30}
    largest = max(float(np.abs(values).max()) for values in view.values.values())
    smallest = min(float(values.min()) for values in view.values.values())
    ends = {(False, False): "neither", (True, False): "max", (False, True): "min"}
    beyond = (largest > view.limit, smallest < -view.limit)
    bar = figure.colorbar(
        image, ax=list(panels), pad=0.02, extend=ends.get(beyond, "both"), **place
    )
    if smallest >= 0:
        # Norms and deviations: the half of the key that they never use is left out.
        (bar.ax.set_ylim if across else bar.ax.set_xlim)(0, view.limit)
    bar.outline.set_edgecolor(MUTED)
    bar.outline.set_linewidth(0.5)
    # As vectors, the neighbouring steps of the key would show seams.
    bar.solids.set_rasterized(True)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.locator = MaxNLocator(4)
