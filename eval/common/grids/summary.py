"""A figure's numbers: each line's over the seeds, and which differences from the first one hold."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval.common.comparison import ONE_SEED, compare
from eval.common.grids.places import CONTROL, NEGATIVE, Run
from eval.common.grids.tuning import Choice

TRAINED = "trained length"  # the test of the task that was trained
_OTHERS = ("seq_len", "accuracy", "rows_right")  # of a test, not shown beside its accuracy

Tests = Callable[[Run, dict[str, Any]], dict[int, dict[str, float]]]


def summary(found: Sequence[tuple[Run, dict[str, Any], Choice]], tests: Tests) -> list[dict]:
    """For each line and place on the axis, `x`: every run, and mean, least and largest over them.

    `also` has the means of what the test found beside the accuracy, such as that of queries whose
    last token another key has; `tried` the validation accuracies by which `lr` was chosen.
    """
    places: dict[tuple, dict[int, dict[str, float]]] = {}
    choices: dict[tuple, Choice] = {}
    for run, record, choice in found:
        for x, test in sorted(tests(run, record).items()):
            place = (run.row, run.column, run.line, x)
            places.setdefault(place, {})[run.cell.seed] = test
            choices[place] = choice
    return [_line(*place, by_seed, choices[place]) for place, by_seed in places.items()]


def _line(
    row: str, column: str, mixer: str, x: int, by_seed: dict[int, dict[str, float]], choice: Choice
) -> dict[str, Any]:
    runs = {seed: test["accuracy"] for seed, test in by_seed.items()}
    names = [name for name in next(iter(by_seed.values())) if name not in _OTHERS]
    values = {name: [t[name] for t in by_seed.values() if name in t] for name in names}
    return {
        "row": row,
        "column": column,
        "mixer": mixer,
        "x": x,
        "mean": statistics.fmean(runs.values()),
        "min": min(runs.values()),
        "max": max(runs.values()),
        "runs": {str(seed): accuracy for seed, accuracy in runs.items()},
        "also": {name: statistics.fmean(found) for name, found in values.items()},
        "lr": choice.rate,
        "lr_on_edge": choice.on_edge,
        "tried": {f"{rate:g}": accuracy for rate, accuracy in sorted(choice.tried.items())},
    }


def differences(
    lines: Sequence[dict[str, Any]], more: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Each panel's first model minus every other at every x, paired by seed.

    Intervals are corrected for the number of all these comparisons, see eval/common/comparison.py.

    Args:
        more: mixers to compare too, where a panel has both.
    """
    panels: dict[tuple, dict[str, dict[str, Any]]] = {}
    pairs = []
    for line in lines:
        if line["row"] == CONTROL or line["mixer"] == NEGATIVE:
            continue
        panel = panels.setdefault((line["row"], line["column"], line["x"]), {})
        if panel:
            pairs.append((next(iter(panel.values())), line))
        panel[line["mixer"]] = line
    for panel in panels.values():
        of_panel = [(panel[a], panel[b]) for a, b in more if a in panel and b in panel]
        pairs += [pair for pair in of_panel if pair not in pairs]
    found = []
    for one, other in pairs:
        runs = [{int(k): v for k, v in line["runs"].items()} for line in (one, other)]
        difference = compare(*runs, len(pairs))
        if difference is None or difference.verdict == ONE_SEED:
            continue
        names = {name: other[name] for name in ("row", "column", "x")}
        names |= {"mixer": one["mixer"], "minus": other["mixer"]}
        found.append(names | dataclasses.asdict(difference))
    return found


def diverged(values: Iterable[tuple[Run, float]]) -> list[dict[str, Any]]:
    """Name the runs whose value is no number."""
    return [
        {"row": run.row, "column": run.column, "mixer": run.line, "seed": run.cell.seed}
        for run, value in values
        if not math.isfinite(value)
    ]


def told_diverged(found: Sequence[Mapping[str, Any]]) -> str:
    """Write what `diverged` gives as a sentence; nothing where there is none."""
    places = [", ".join(filter(None, (x["row"], x["column"]))) for x in found]
    runs = [
        f"`{x['mixer']}` on {place} with seed {x['seed']}"
        for x, place in zip(found, places, strict=True)
    ]
    if not runs:
        return ""
    return f"Diverged, so that there is no number to compare: {'; '.join(runs)}."


def training(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return when, where and at which commits runs were trained, perhaps by earlier calls."""
    found = [record["provenance"] for record in records]
    dates = sorted(each["date"] for each in found)
    return {
        "commits": sorted({each["commit"] or "unknown" for each in found}),
        "machines": sorted({f"{each['machine']}, {each['device']}" for each in found}),
        "first": dates[0],
        "last": dates[-1],
    }


def told_training(found: Mapping[str, Any]) -> str:
    """Write what `training` gives as a sentence."""
    commits = dict.fromkeys(each[:9] + "+" * each.endswith("+") for each in found["commits"])
    plural = "s" if len(commits) > 1 else ""
    changed = " (+: with changes)" if "+" in "".join(commits) else ""
    machines = "; ".join(found["machines"])
    first, last = (found[end][:16].replace("T", " ") for end in ("first", "last"))
    where = f"at commit{plural} {', '.join(commits)}{changed}; {machines}"
    return f"Runs ended between {first} and {last} UTC, {where}."


def told_rate(line: dict[str, Any]) -> str:
    """Write a line's rate, with the side of those tried on which it lies."""
    if not line["lr_on_edge"]:
        return f"{line['lr']:g}"
    least = f"{line['lr']:g}" == f"{min(map(float, line['tried'])):g}"  # as `tried` has them
    return f"{'≤' if least else '≥'} {line['lr']:g}"


def told_edges(lines: Sequence[dict[str, Any]]) -> str:
    """Describe of how many lines the rate lies on an edge; nothing where it is none."""
    edges = sum(line["lr_on_edge"] for line in lines)
    if not edges:
        return ""
    return (
        f"In {edges} of {len(lines)} rows it is the least or largest of those tried (marked ≤ "
        "or ≥), one beyond the grid's edge among them: a rate further on might be better. "
    )
