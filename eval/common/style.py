"""The common style of all pictures, and saving them as PNG, SVG and inline SVG.

Every run keeps one colour and one marker in all pictures, and lines differ by marker as well as
by colour, so that they can be told apart without seeing colours.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.sax.saxutils import quoteattr

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cat_lm.core.files import atomic_write

# After Okabe and Ito: distinct under the common kinds of colour blindness, in print and on screen.
RUN_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8a6d00"),
    *("#56708a", "#3fa7d6", "#c22f3d", "#4d4d4d", "#7bb661"),
    *("#e69f00", "#332288"),
)
# Their number differs from the colours', so that pairs repeat late.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
NEGATIVE, POSITIVE = "#2166ac", "#b2540b"  # The ends of `diverging_map`.
INK, MUTED, GRID, PAPER = "#1c2024", "#5f6871", "#e2e5e9", "#ffffff"

MANY_RUNS = 5  # With more runs the legend stands below the picture.
LAGS = "lag (tokens back)"  # The label of the axis of a convolution's taps.
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


def diverging_map() -> ListedColormap:
    """Return a colour map: blue below zero, orange above, white at zero."""
    values = np.linspace(-1, 1, 257)
    strength = (np.abs(values) ** 0.8)[:, None]
    colours = np.where((values < 0)[:, None], to_rgb(NEGATIVE), to_rgb(POSITIVE))
    return ListedColormap(1 + strength * (colours - 1))


def plain_label(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as formulas."""
    return text.replace("$", r"\$")


def legend_key(label: str, index: int) -> Line2D:
    """Make a run's key in a legend.

    Legends take these, not the lines themselves: among those, labels that begin with an underscore
    are left out.
    """
    style = {"color": run_colour(index), "marker": run_marker(index), "mec": PAPER}
    return Line2D([], [], label=plain_label(label), **style)


def save_figure(figure: Figure, stem: Path | str) -> None:
    """Write `stem`.png and `stem`.svg atomically."""
    stem = Path(stem)
    # Not `with_suffix`: a name such as filters_lr0.001 would lose what follows its point.
    # The hash salt makes the SVG's ids, and so its bytes, the same every time.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": stem.name}):
        with atomic_write(stem.with_name(f"{stem.name}.png"), "wb") as file:
            figure.savefig(file, format="png", dpi=200)
        with atomic_write(stem.with_name(f"{stem.name}.svg"), "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})


def page_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an inline SVG element in the page's font.

    Args:
        name: unique on the page; keeps the ids of two drawings apart.
        description: description for people who cannot see the image.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page sets the font; only sizes are kept.
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r' width="[^"]*pt" height="[^"]*pt"', "", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label={quoteattr(description)} ', 1)


def short_count(value: float) -> str:
    """Return a short form: 12.3M for 12300000."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"
