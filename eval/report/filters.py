"""Draw the portraits of learned convolution filters.

A row of every heat map is a head, layers from top to bottom. What the columns are depends on the
kind of convolution:

    head        the taps of the head's filter, lag 0 (the token itself) first
    depthwise   the mean over the head's channels of each tap; below, their standard deviation
    multihead   the taps that a head has for its own input; below, for each head it reads from, the
                Euclidean norm of the taps over all lags
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cat_lm.ops.convolution import kinds
from eval.common.filters import Filters, head_norms, own_taps
from eval.common.style import INK, LAGS, MUTED, STYLE, WIDE, diverging_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

HEADS = "reads from head"


@dataclass(frozen=True)
class View:
    """One heat map of every stream.

    Attributes:
        title: what the colours are.
        values: stream -> [layers, heads, columns].
        columns: what the columns are.
        limit: where the colours end.
    """

    title: str
    values: dict[str, np.ndarray]
    columns: str
    limit: float


def views(filters: Filters) -> list[View]:
    """The heat maps that show `filters`, the first always of taps by lag."""
    taps = own_taps(filters)
    # Lag 0 is near 1 in a model that started at the identity and would hide all others.
    first = _view(_title(filters.kind), taps, LAGS, [t[..., 1:] for t in taps.values()])
    shown, axes = [first], filters.kind.filter_axes
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


def _title(kind: kinds.Kind) -> str:
    if kind.mixes_heads:
        return "taps for the head's own input"
    return "filter taps, mean over channels" if "D" in kind.filter_axes else "filter taps"


def _view(
    title: str, values: dict[str, np.ndarray], columns: str, scale: Sequence[np.ndarray]
) -> View:
    """A view whose colours end at the largest of `scale`, or, where that is empty, of all."""
    scale = [part for part in scale if part.size] or list(values.values())
    limit = max(max(float(np.abs(part).max()) for part in scale), 1e-8)
    return View(title, values, columns, limit)


def filters_figure(filters: Filters, size: tuple[float, float] = WIDE) -> Figure:
    """The portrait: a row of panels for each view, a panel for each stream.

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
            _layer_ticks(panels[0], layers)
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


def _layer_ticks(axes: Axes, layers: int) -> None:
    axes.set_yticks(range(0, layers, max(1, layers // 12)))


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
