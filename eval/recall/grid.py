"""`python -m eval.recall figure`: runs a grid, and draws all points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from cat_lm.files import write_json
from eval.figures import MARKERS, MUTED, RUN_COLOURS, STYLE
from eval.provenance import provenance
from eval.recall import cells
from eval.recall.execution import Execution, run_unfinished
from eval.recall.plan import FIGURES, SCALES, Run, plan
from eval.recall.theory.figures import save

CONTROL_AT_LEAST = 0.99


def figure(name: str, scale_name: str, out: Path, execution: Execution) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and draws a figure.

    Returns:
        What OUT/NAME.json got, or none after an estimate alone.
    """
    runs = plan(name, SCALES[scale_name])
    if not run_unfinished(f"{name} at {scale_name} scale", runs, out, execution):
        return None
    rows = [(run, cells.finished(out, run.cell)) for run in runs]
    record = {
        "figure": name,
        "shows": FIGURES[name][0],
        "number in the paper (AAAI / workshop / arXiv)": FIGURES[name][1],
        "scale": scale_name,
        "lines": summary(rows),
        "positive_control": rows[-1][1]["best_accuracy"],
        "provenance": provenance(),
    }
    write_json(out / f"{name}.json", record)
    save(draw(rows, name, scale_name), out, name)
    if record["positive_control"] < CONTROL_AT_LEAST:
        print(
            f"positive control at {record['positive_control']:.3f}, below {CONTROL_AT_LEAST}: "
            "training was too short or small to compare the models that failed"
        )
    return record


def points(run: Run, record: dict[str, Any]) -> dict[int, float]:
    """x -> accuracy: the trained length, and others with their items in proportion."""
    if not run.cell.test_lengths:
        return {run.cell.seq_len: record["best_accuracy"]}
    return {
        test["seq_len"]: test["accuracy"]
        for name, test in record["tests"].items()
        if "," not in name and name != "trained length"
    }


def summary(rows: Sequence[tuple[Run, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each line and x: every run, and mean, least and largest at the best learning rate."""
    found: dict[tuple, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, record in rows:
        for x, accuracy in points(run, record).items():
            found[run.row, run.column, run.line, x][run.cell.lr].append(accuracy)
    lines = []
    for (row, column, line, x), rates in found.items():
        best = max(rates, key=lambda rate: sum(rates[rate]) / len(rates[rate]))
        values, ordered = rates[best], sorted(rates)
        lines.append(
            {
                "row": row,
                "column": column,
                "mixer": line,
                "seq_len": x,
                "best_of_all": max(max(v) for v in rates.values()),
                "best_lr": best,
                "best_lr_on_grid_edge": len(ordered) > 1 and best in (ordered[0], ordered[-1]),
                "mean": sum(values) / len(values),
                "min": min(values),
                "max": max(values),
                "runs": {f"{rate:g}": accuracies for rate, accuracies in rates.items()},
            }
        )
    return lines


def draw(rows: Sequence[tuple[Run, dict[str, Any]]], name: str, scale: str) -> Figure:
    """Panels of accuracy against length: the best of all runs as lines, every run as a point."""
    shown = [(run, record) for run, record in rows if run.row != "control"]
    down, across = (list(dict.fromkeys(getattr(r, k) for r, _ in shown)) for k in ("row", "column"))
    lines = list(dict.fromkeys(run.line for run, _ in shown))
    with matplotlib.rc_context(STYLE):
        size = (2.2 + 2.8 * len(across), 0.8 + 2.5 * len(down))
        drawing = Figure(figsize=size, layout="constrained")
        panels = drawing.subplots(len(down), len(across), squeeze=False, sharey=True)
        for i, row in enumerate(down):
            for j, column in enumerate(across):
                part = [(r, d) for r, d in shown if (r.row, r.column) == (row, column)]
                _panel(panels[i, j], part, lines)
                panels[i, j].set_title(f"{row}, {column}", loc="left")
        for axes in panels[-1]:
            axes.set_xlabel("sequence length")
        for axes in panels[:, 0]:
            axes.set_ylabel("accuracy")
        drawing.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
        control = rows[-1][1]["best_accuracy"]
        drawing.suptitle(
            f"{name} ({scale}): best of all runs, and every run; positive control {control:.3f}",
            fontsize=9,
        )
    return drawing


def _panel(axes: Any, part: Sequence[tuple[Run, dict[str, Any]]], lines: Sequence[str]) -> None:
    for index, line in enumerate(lines):
        colour = MUTED if line == "none" else RUN_COLOURS[index % len(RUN_COLOURS)]
        marker = MARKERS[index % len(MARKERS)]
        every = [p for run, d in part if run.line == line for p in points(run, d).items()]
        best: dict[int, float] = {}
        for x, accuracy in every:
            best[x] = max(accuracy, best.get(x, 0.0))
        style = "--" if index >= len(RUN_COLOURS) else "-"
        axes.scatter(*zip(*every, strict=True), s=9, color=colour, alpha=0.45, linewidths=0)
        xs = sorted(best)
        axes.plot(xs, [best[x] for x in xs], style, color=colour, marker=marker, label=line)
    trained = {run.cell.seq_len for run, _ in part if run.cell.test_lengths}
    for length in trained:
        axes.axvline(length, color=MUTED, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for run, d in part for x in points(run, d)})
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
