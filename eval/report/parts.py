"""Words, numbers and drawings of the report's page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from eval.common.runs import Run
from eval.common.style import NARROW, WIDE, page_svg


def drawn(
    draw: Callable[[tuple[float, float]], Figure], name: str, caption: str, warning: str = ""
) -> dict[str, Any]:
    """Draw a figure twice; the style shows the one that suits the screen's width.

    Args:
        warning: what of the caption is to stand out.
    """
    wide, narrow = (
        page_svg(draw(size), f"{name}-{kind}", name) for kind, size in (("w", WIDE), ("n", NARROW))
    )
    return {"wide": wide, "narrow": narrow, "caption": caption, "warning": warning}


def model_words(run: Run) -> str:
    """Say what the run's model is."""
    return run.config.architecture.words(run.config.model)


def number(value: float | None) -> str:
    """Show four digits or so: 1.234, 12.34, 123.4, 1,234."""
    if value is None:
        return "n/a"
    places = next((n for limit, n in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{places}f}"
