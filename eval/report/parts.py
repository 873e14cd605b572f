"""Words, numbers and drawings of the report's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def unlike(runs: Sequence[Run]) -> list[str]:
    """Say why the runs' losses are no measure of their models; empty where they may be compared."""
    data: dict[str | None, list[str]] = {}
    lengths: dict[int, list[str]] = {}
    scored: dict[int | None, list[str]] = {}
    for run in runs:
        data.setdefault(run.data, []).append(run.label)
        lengths.setdefault(run.config.data.context_length, []).append(run.label)
        scored.setdefault(run.config.validation.max_tokens, []).append(run.label)
    reasons = []
    if len(data) > 1 or (None in data and len(runs) > 1):
        sure = "Not" if len(data.keys() - {None}) > 1 else "Perhaps not"
        named = {key[:16] if key else "unknown": names for key, names in data.items()}
        reasons.append(f"{sure} trained on the same data, by fingerprint: {_grouped(named)}.")
    if len(lengths) > 1:
        named = {f"{length:,} tokens": names for length, names in sorted(lengths.items())}
        reasons.append(f"Not trained at one context length: {_grouped(named)}.")
    if len(scored) > 1:
        named = {f"{n:,} tokens" if n else "all of it": names for n, names in scored.items()}
        reasons.append(f"Not scored on as much held-out text: {_grouped(named)}.")
    return reasons


def _grouped(names: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{key} ({', '.join(labels)})" for key, labels in names.items())


def number(value: float | None) -> str:
    """Show four digits or so: 1.234, 12.34, 123.4, 1,234."""
    if value is None:
        return "n/a"
    places = next((n for limit, n in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{places}f}"
