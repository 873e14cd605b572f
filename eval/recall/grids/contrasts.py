"""Which differences a figure tells: all that are on its page are corrected for together.

Each panel's first model is compared with every other, of copying by generated answers as well. The
figure of one layer also compares a model's one layer with its two, that of widths a model at the
largest width with itself at the least, and what it gains so with what the first model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eval.common.grids.places import CONTROL, NEGATIVE
from eval.common.grids.summary import differences
from eval.recall.grids.plan import TWO_LAYERS

GENERATED = ", generated"  # how rows end whose accuracy is that with a model's own answers fed back

Line = dict[str, Any]


def told(lines: Sequence[Line], generated: Sequence[Line], axis: str) -> list[dict[str, Any]]:
    """All differences of a page, paired by seed, with intervals for their number.

    Args:
        lines, generated: of `summary`, by accuracy and by that of generated answers.
        axis: length or width.

    Returns:
        As `differences`: `mixer` less `minus` at `row`, `column` and `x`.
    """
    shown = [line for line in lines if not line["row"].endswith(TWO_LAYERS)]
    shown += [{**x, "row": x["row"] + GENERATED} for x in generated if x["row"] != CONTROL]
    pairs = list(_one_less_two(lines))
    if axis == "width":
        widths = list(_widest_less_least(lines))
        pairs += [*widths, *_gains(widths)]
    # A panel for each pair, since `differences` takes all others of a panel from its first.
    apart = [
        {**line, "column": (line["column"], number)}
        for number, pair in enumerate(pairs)
        for line in pair
    ]
    found = differences([*shown, *apart])
    columns = [x["column"] for x in found]
    plain = [column[0] if isinstance(column, tuple) else column for column in columns]
    return [{**x, "column": column} for x, column in zip(found, plain, strict=True)]


def _one_less_two(lines: Sequence[Line]) -> Iterator[tuple[Line, Line]]:
    """Each line of one layer, with the same model's of two where that was run."""
    keys = ("row", "column", "mixer", "x")
    at = {tuple(line[key] for key in keys): line for line in lines if line["mixer"] != NEGATIVE}
    for (row, *place), line in at.items():
        if two := at.get((row + TWO_LAYERS, *place)):
            yield line, {**two, "row": row, "mixer": line["mixer"] + TWO_LAYERS}


def _widest_less_least(lines: Sequence[Line]) -> Iterator[tuple[Line, Line]]:
    """Each model's line at its largest width, with that at its least."""
    models: dict[tuple, list[Line]] = {}
    for line in lines:
        if line["row"] != CONTROL and line["mixer"] != NEGATIVE:
            models.setdefault((line["row"], line["column"], line["mixer"]), []).append(line)
    for of_model in models.values():
        least, widest = (end(of_model, key=lambda line: line["x"]) for end in (min, max))
        if least is not widest:
            name, x = widest["mixer"], widest["x"]
            yield (
                {**widest, "mixer": f"{name}, d = {x}"},
                {**least, "mixer": f"{name}, d = {least['x']}", "x": x},
            )


def _gains(widths: Sequence[tuple[Line, Line]]) -> Iterator[tuple[Line, Line]]:
    """What each further model of a panel gains with its width, with what the first one does."""
    first: dict[tuple, Line] = {}
    for widest, least in widths:
        both = widest["runs"].keys() & least["runs"].keys()
        runs = {seed: widest["runs"][seed] - least["runs"][seed] for seed in both}
        gain = {**widest, "mixer": f"{widest['mixer']} less {least['mixer']}", "runs": runs}
        panel = (widest["row"], widest["column"])
        if panel in first:
            yield gain, first[panel]
        first.setdefault(panel, gain)
