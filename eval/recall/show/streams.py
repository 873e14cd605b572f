"""The page, the table of numbers and the picture of the ablation of streams."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.common.comparison import UNCLEAR
from eval.common.grids.summary import told_diverged, told_training
from eval.common.style import STYLE, run_colour, run_marker
from eval.common.text_table import markdown_table
from eval.recall.show.page import FOUND

RECALL = "MQAR"
BETWEEN = "linear − softmax"  # how columns begin that stand for two mixers
_CONTRAST = ("mixer", "contrast")
_ACROSS = (
    "one line less another of the same mixer",
    "what filters change in linear attention less what they change in softmax attention",
)
ALGEBRA = (
    "† by algebra, and no finding: without a filter on k or v the layer sums over positions what "
    "each token gives by itself. Exchanging the values of two keys then changes no answer of a "
    "query whose window holds no pair, and a guess among the row's values is all there is."
)


def markdown(record: dict[str, Any]) -> str:
    """The page from what streams.json holds: what was run, and the tables of each task."""
    left_out = "; ".join(record["not_run"])
    head = [
        f"# streams, at {record['scale']} scale",
        f"`{record['provenance']['command']}`",
        told_training(record["trained"]) + (f" Not run: {left_out}." if left_out else ""),
        *filter(None, [told_diverged(record["diverged"])]),
        tables(record["lines"], record["contrasts"]),
    ]
    return "\n\n".join(head)


def tables(lines: Sequence[dict[str, Any]], contrasts: Sequence[dict[str, Any]]) -> str:
    """For each task: values by line and mixer, the differences from no filters, the contrasts."""
    text = []
    for row in dict.fromkeys(line["row"] for line in lines):
        of_row = {(x["mixer"], x["streams"]): x for x in lines if x["row"] == row}
        mixers, names = (list(dict.fromkeys(key[i] for key in of_row)) for i in (0, 1))
        some = next(iter(of_row.values()))
        seeds = len(some["runs"])
        unit = "accuracy" if row == RECALL else "loss on held-out documents, nats a token"
        found = f"; in how many of them above {FOUND:g}" if row == RECALL else ""
        text += [f"{row}: {unit}, mean (least to largest) of {seeds} seeds{found}", ""]
        text.append(_table(of_row, mixers, names, _value))
        if row == RECALL:
            text += ["", ALGEBRA]
        elif (error := some["standard_error_of_documents"]) is not None:
            text += ["", f"Standard error of a loss over the documents: {error:.3f} (first model)."]
        text += ["", _edges(of_row.values()), ""]
        compared = [name for name in names if of_row[mixers[0], name]["less_no_filters"]]
        together = of_row[mixers[0], compared[0]]["less_no_filters"]["comparisons"]
        text += [
            f"{row}: less the same without filters [95% interval over seeds"
            f"{'' if row == RECALL else ' and documents'}, corrected for the task's "
            f"{together} comparisons]; a word only where the interval leaves out 0",
            "",
            _table(of_row, mixers, compared, lambda line: _difference(line["less_no_filters"])),
            "",
            *_contrasts([x for x in contrasts if x["row"] == row]),
        ]
    return "\n".join(text)


def _contrasts(of_row: Sequence[dict[str, Any]]) -> list[str]:
    """Return what else was to be compared, by its name and mixer; intervals as those above."""
    text = []
    for across in (False, True):
        found = [x for x in of_row if x["mixer"].startswith(BETWEEN) == across]
        if not found:
            continue
        mixers, names = (list(dict.fromkeys(x[key] for x in found)) for key in _CONTRAST)
        cells = {(x["contrast"], x["mixer"]): _difference(x) for x in found}
        rows = [[name, *(cells.get((name, mixer), "–") for mixer in mixers)] for name in names]
        text += [f"{of_row[0]['row']}: {_ACROSS[across]}; intervals as above", ""]
        text += [markdown_table(["contrast", *mixers], rows), ""]
    return text


def _table(
    of_row: dict[tuple[str, str], dict[str, Any]],
    mixers: Sequence[str],
    names: Sequence[str],
    shown: Any,
) -> str:
    rows = [[name, *(shown(of_row[mixer, name]) for mixer in mixers)] for name in names]
    return markdown_table(["convolved", *mixers], rows)


def _value(line: dict[str, Any]) -> str:
    text = f"{line['mean']:.3f} ({line['min']:.3f} to {line['max']:.3f})"
    if line["row"] == RECALL:
        text += f"; {sum(accuracy > FOUND for accuracy in line['runs'].values())}"
    return text + (" †" if line["by_algebra"] else "")


def _difference(found: dict[str, Any]) -> str:
    if found["low"] is None:
        # A run that diverged leaves no interval, and fewer seeds than were run.
        lost = f" ({found['n']} of {found['n'] + found['lost']} seeds)" if found["lost"] else ""
        return f"{found['mean']:+.3f}{lost}"
    word = "" if found["verdict"] == UNCLEAR else f" {found['verdict']}"
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]{word}"


def _edges(lines: Sequence[dict[str, Any]]) -> str:
    several = [line for line in lines if len(line["rates_tried"]) > 1]
    if not several:
        return "One learning rate was run."
    edges = [line for line in several if line["rate_on_grid_edge"]]
    said = f"The chosen learning rate is on the edge of what was tried in {len(edges)} of "
    named = "; ".join(f"{x['mixer']}, {x['streams']}: {x['rate']:g}" for x in edges)
    return f"{said}{len(several)}{': ' + named if named else ''}."


def csv_text(lines: Sequence[dict[str, Any]]) -> str:
    """A line of numbers for each row, mixer and line of streams."""
    stream = io.StringIO()
    names = ("row", "mixer", "streams", "by_algebra", "rate", "rate_on_grid_edge")
    names += ("mean", "min", "max", "less_no_filters", "low", "high", "verdict")
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        found = line["less_no_filters"] or {}
        parts = {name: found.get(name) for name in ("low", "high", "verdict")}
        writer.writerow({**line, **parts, "less_no_filters": found.get("mean")})
    return stream.getvalue()


def draw(lines: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each task: a subset a place, a mixer a colour; a point a run, the mean larger.

    Runs that find a task or do not leave means between, which no run has: so every run is drawn.
    """
    rows, mixers, names = (
        list(dict.fromkeys(x[key] for x in lines)) for key in ("row", "mixer", "streams")
    )
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(9.0, 1.4 + 2.6 * len(rows)), layout="constrained")
        panels = drawing.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, row in zip(panels, rows, strict=True):
            for number, mixer in enumerate(mixers):
                beside = (number - (len(mixers) - 1) / 2) * 0.8 / len(mixers)
                found = [x for x in lines if (x["row"], x["mixer"]) == (row, mixer)]
                places = [names.index(line["streams"]) + beside for line in found]
                _draw_mixer(axes, number, mixer, found, places)
            axes.set_title(row, loc="left")
            axes.set_ylabel("accuracy" if row == RECALL else "loss, nats a token")
        panels[-1].set_xticks(range(len(names)), names, rotation=30, ha="right")
        panels[-1].set_xlabel("convolved streams (small points: every run; marks: means)")
        drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return drawing


def _draw_mixer(
    axes: Axes,
    number: int,
    mixer: str,
    lines: Sequence[dict[str, Any]],
    places: Sequence[float],
) -> None:
    """Draw a mixer's lines, each at its place."""
    colour = run_colour(number)
    for x, line in zip(places, lines, strict=True):
        runs = line["runs"].values()
        axes.scatter([x] * len(runs), runs, s=12, color=colour, alpha=0.6, linewidths=0, zorder=2)
    style = {"color": colour, "marker": run_marker(number), "markersize": 4.5, "alpha": 0.8}
    means = [line["mean"] for line in lines]
    axes.plot(places, means, linestyle="none", label=mixer, zorder=3, **style)
