"""Words, numbers and drawings of the report's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from eval.common.runs import Run
from eval.common.style import NARROW, WIDE, page_svg

if TYPE_CHECKING:
    from cat_lm.config import RunConfig


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
    """Return what the run's model is."""
    return run.config.architecture.summary(run.config.model).words


def unlike(runs: Sequence[Run]) -> list[str]:
    """Return why the runs' losses do not measure their models; empty where they do."""
    data: dict[str | None, list[str]] = {}
    lengths: dict[int, list[str]] = {}
    scored: dict[int | None, list[str]] = {}
    masked: dict[bool, list[str]] = {}
    for run in runs:
        data.setdefault(run.data, []).append(run.label)
        lengths.setdefault(run.config.data.context_length, []).append(run.label)
        scored.setdefault(_scored(run.config), []).append(run.label)
        masked.setdefault(run.config.data.mask_documents, []).append(run.label)
    reasons = []
    if len(data) > 1 or (None in data and len(runs) > 1):
        sure = "Not" if len(data.keys() - {None}) > 1 else "Not known to be"
        named = {key[:16] if key else "unknown": names for key, names in data.items()}
        reasons.append(f"{sure} trained on the same data, by fingerprint: {_grouped(named)}.")
    if len(lengths) > 1:
        named = {f"{length:,} tokens": names for length, names in sorted(lengths.items())}
        reasons.append(f"Not trained at one context length: {_grouped(named)}.")
    if len(scored) > 1:
        named = {f"{n:,} tokens" if n else "no limit": names for n, names in scored.items()}
        reasons.append(f"Perhaps not scored on as much held-out text: {_grouped(named)}.")
    if len(masked) > 1:
        named = {"apart" if key else "joined": names for key, names in masked.items()}
        reasons.append(f"Documents of a window are not read alike: {_grouped(named)}.")
    return reasons


def _scored(config: RunConfig) -> int | None:
    """The most tokens of held-out text that are scored, in whole windows; None for no limit."""
    asked, length = config.validation.max_tokens, config.data.context_length
    return None if asked is None else max(1, asked // length) * length


def _grouped(names: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{key} ({', '.join(labels)})" for key, labels in names.items())


def number(value: float | None) -> str:
    """Show four digits or so: 1.234, 12.34, 123.4, 1,234."""
    if value is None:
        return "n/a"
    places = next((n for limit, n in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{places}f}"
