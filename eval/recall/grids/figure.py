"""`python -m eval.recall figure`: runs a grid, checks its controls, draws and tells all of it."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.io.files import write_json, write_text
from cat_lm.labels import IGNORE_INDEX
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import NEGATIVE, SCALES, Run, plan
from eval.recall.show import filter_plots, page, pictures
from eval.recall.tasks import generate
from eval.recall.train import cells
from eval.recall.train.execution import Execution, run_unfinished

if TYPE_CHECKING:
    from eval.recall.show.pictures import Points, Rows

CONTROL_AT_LEAST = 0.99
_DEVIATIONS = 5  # of chance, up to which the negative control may come: it is tested many times


def figure(name: str, scale_name: str, out: Path, execution: Execution) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes OUT/NAME.json, .md, .png and .svg.

    Where models were also tested with a fixed number of keys, OUT/NAME-fixed is a picture of that;
    OUT/NAME-filters shows the learned filters.

    Returns:
        What OUT/NAME.json got, or none after an estimate alone.
    """
    runs = plan(name, SCALES[scale_name])
    stems = (name, f"{name}-fixed", f"{name}-filters")
    pictures_of = [file for stem in stems for file in named(stem, *PICTURES)]
    if not execution.estimate_only:
        claim_outputs(out, f"{name}.json", [f"{name}.md", *pictures_of])
    if not run_unfinished(f"{name} at {scale_name} scale", runs, out, execution):
        return None
    rows = [(run, cells.finished(out, run.cell)) for run in runs]
    record = {
        "figure": name,
        "shows": FIGURES[name].shows,
        "number in the paper (AAAI / workshop / arXiv)": FIGURES[name].number,
        "scale": scale_name,
        "positive_control": rows[-1][1]["best_accuracy"],
        "controls": controls(rows),
        "lines": summary(rows, points),
        "fixed_items": summary(rows, fixed_points),
        "filters": filter_plots.table(rows),
        "provenance": provenance(),
    }
    _draw(record, rows, out)
    write_text(out / f"{name}.md", page.markdown(record))
    write_json(out / f"{name}.json", record)
    for line in page.warnings(record):
        print(line)
    return record


def _draw(record: dict[str, Any], rows: Rows, out: Path) -> None:
    name = record["figure"]
    title = picture_title(record)
    save_figure(pictures.draw(rows, points, title), out / name)
    if record["fixed_items"]:
        fixed = [row for row in rows if fixed_points(*row)]
        drawing = pictures.draw(fixed, fixed_points, f"{title}\nas many keys as trained")
        save_figure(drawing, out / f"{name}-fixed")
    if record["filters"]:
        save_figure(filter_plots.draw(record["filters"], title), out / f"{name}-filters")


def picture_title(record: dict[str, Any]) -> str:
    """Lines short enough to stand beside the legend of one column of panels."""
    title = f"{record['figure']}, {record['scale']} scale"
    if record["controls"]["positive"]["passed"]:
        return title
    return f"{title}\npositive control failed ({record['positive_control']:.2f})"


def points(run: Run, record: dict[str, Any]) -> dict[int, float]:
    """Length -> accuracy: the best seen at the trained length; at several, the last with items in
    proportion."""
    if not run.across_tests:
        return {run.cell.seq_len: record["best_accuracy"]}
    return {
        test["seq_len"]: test["accuracy"]
        for name, test in record["tests"].items()
        if "," not in name
    }


def fixed_points(run: Run, record: dict[str, Any]) -> dict[int, float]:
    """Length -> accuracy with as many items as in training, from the trained length on."""
    tests = record["tests"] if run.across_tests else {}
    found = {test["seq_len"]: test["accuracy"] for name, test in tests.items() if "," in name}
    return {run.cell.seq_len: tests["trained length"]["accuracy"], **found} if found else {}


def controls(rows: Rows) -> dict[str, Any]:
    """Check that attention learned four keys, and models without mixing stayed at chance.

    At chance: at most five standard deviations of a guesser's accuracy above it.
    """
    best = rows[-1][1]["best_accuracy"]
    positive = {
        "accuracy": best,
        "at_least": CONTROL_AT_LEAST,
        "passed": best >= CONTROL_AT_LEAST,
        "task": rows[-1][0].cell.task,
    }
    return {
        "positive": positive,
        "negative": [_negative(run, record) for run, record in rows if run.line == NEGATIVE],
    }


def _negative(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    task = run.cell.make_task()
    labels = generate(task, 1, seed=0, split="test").labels
    answers = run.cell.test_examples * int((labels != IGNORE_INDEX).sum())
    spread = math.sqrt(task.chance * (1 - task.chance) / answers)
    most = min(task.chance + _DEVIATIONS * spread, 1.0)
    return {
        "row": run.row,
        "column": run.column,
        "seq_len": run.cell.seq_len,
        "accuracy": record["best_accuracy"],
        "chance": task.chance,
        "at_most": most,
        "passed": record["best_accuracy"] <= most,
    }


def summary(rows: Rows, points: Points) -> list[dict[str, Any]]:
    """For each line and length: every run, and mean, least and largest at the best learning rate.

    The best rate is the one with the best mean over seeds, for each length by itself.
    """
    found: dict[tuple, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, record in rows:
        for x, accuracy in sorted(points(run, record).items()):
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
