"""Small pieces of the report's page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from matplotlib.figure import Figure

from eval.common.runs import Run
from eval.common.style import NARROW, WIDE, page_svg, run_colour


def figure_html(draw: Callable[[tuple[float, float]], Figure], name: str, caption: str) -> str:
    """Two drawings of one figure; the style shows the one that suits the screen's width."""
    wide, narrow = (
        page_svg(draw(size), f"{name}-{kind}", name) for kind, size in (("w", WIDE), ("n", NARROW))
    )
    return (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def run_name(run: Run) -> str:
    """The run's label and, small below it, what the model is."""
    words = run.config.architecture.words(run.config.model)
    return f"{escape(run.label)}<small>{escape(words)}</small>"


def colour_key(index: int) -> str:
    return f'<span class="key" style="background: {run_colour(index)}"></span>'


def note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def number(value: float | None) -> str:
    """Four digits or so: 1.234, 12.34, 123.4, 1,234."""
    if value is None:
        return "n/a"
    places = next((n for limit, n in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{places}f}"
