"""`python -m eval.recall figure`: tunes and runs a grid, checks controls, draws and tells it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.files import finite, write_json, write_text
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.common.grids import pictures
from eval.common.grids.execution import Execution, alone_in
from eval.common.grids.summary import TRAINED, diverged, summary, training
from eval.common.grids.tuning import TUNING_SEED, Choice, all_records, run_tuned
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.recall.grids import contrasts
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import CONTROL, NEGATIVE, SCALES, Place, Run, plan
from eval.recall.show import filter_plots, page
from eval.recall.tasks import generate

if TYPE_CHECKING:
    from eval.common.grids.pictures import Points, Rows

    Found = Sequence[tuple[Run, dict[str, Any], Choice]]

CONTROL_AT_LEAST = 0.99
_DEVIATIONS = 5  # of chance, up to which the negative control may come: it is tested many times


def figure(
    name: str,
    scale_name: str,
    out: Path,
    execution: Execution,
    seeds: int | None = None,
    models: Sequence[str] = (),
    panels: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes OUT/NAME.json, .md, .png and .svg.

    OUT/NAME-fixed is a picture of tests with a fixed number of keys, OUT/NAME-generated of copying
    with a model's own answers fed back, OUT/NAME-filters of the learned filters.

    Args:
        seeds: runs of each model, in place of the scale's.
        models: mixers, in place of the scale's; the controls are always there.
        panels: rows of them; none: all.

    Returns:
        What OUT/NAME.json got, or none after an estimate alone.
    """
    scale = SCALES[scale_name].with_models(models) if models else SCALES[scale_name]
    if seeds is not None:
        scale = replace(scale, seeds=seeds, length_seeds=seeds)
    places = plan(name, scale, panels)
    for place in places:
        place.run.cell.tests()  # refused now, not after hours of training
    with alone_in(out, execution):
        if not execution.estimate_only:
            _claim(name, out)
        found = run_tuned(f"{name} at {scale_name} scale", places, out, execution)
    if found is None:
        return None
    rows = [(run, record) for run, record, _ in found]
    lines, shown = summary(found, tests), _names(places)
    generated = summary(found, generated_tests)
    axis = "width" if any(run.across == "width" for run, _ in rows) else "length"
    record = {
        "figure": name,
        "shows": FIGURES[name].shows,
        "number in the paper (AAAI / workshop / arXiv)": FIGURES[name].number,
        "scale": scale_name,
        "trained": training(all_records(places, out)),
        "tuning_seed": TUNING_SEED,
        "not_run": [one for one in _names(plan(name, SCALES[scale_name])) if one not in shown],
        "axis": axis,
        "controls": controls(rows),
        "diverged": diverged((run, _least(record)) for run, record in rows),
        "lines": lines,
        "fixed_items": summary(found, fixed_tests),
        "generated": generated,
        "differences": contrasts.told(lines, generated, axis),
        "filters": filter_plots.table(rows),
        "provenance": provenance(),
    }
    write_json(out / f"{name}.json", finite(record))  # a rate may diverge
    write_text(out / f"{name}.md", page.markdown(record))
    _draw(record, rows, out)
    for line in page.warnings(record):
        print(line)
    return record


def _least(record: Mapping[str, Any]) -> float:
    return min(test["accuracy"] for test in record["tests"].values())


def _names(places: Sequence[Place]) -> list[str]:
    """The mixers of a figure's panels and the panels' rows, in their order."""
    runs = [place.run for place in places if place.run.row != CONTROL]
    return list(dict.fromkeys([run.line for run in runs] + [run.row for run in runs]))


def _claim(name: str, out: Path) -> None:
    """Lists the figure's files."""
    stems = (name, *(f"{name}-{kind}" for kind in ("fixed", "generated", "filters")))
    pictures_of = [file for stem in stems for file in named(stem, *PICTURES)]
    claim_outputs(out, f"{name}.json", [f"{name}.md", *pictures_of])


def _draw(record: dict[str, Any], rows: Rows, out: Path) -> None:
    name, axis = record["figure"], record["axis"]
    title = picture_title(record)
    save_figure(pictures.draw(rows, points(), title, points("one_token_ceiling"), axis), out / name)
    if record["fixed_items"]:
        fixed = [row for row in rows if fixed_tests(*row)]
        of_fixed = [points(key, fixed_tests) for key in ("accuracy", "one_token_ceiling")]
        told = f"{title}\nas many keys as trained"
        drawing = pictures.draw(fixed, of_fixed[0], told, of_fixed[1], axis)
        save_figure(drawing, out / f"{name}-fixed")
    if page.generated(record):
        told = f"{title}\nits own answers fed back"
        drawing = pictures.draw(rows, points("free_running_accuracy"), told, None, axis)
        save_figure(drawing, out / f"{name}-generated")
    if record["filters"]:
        save_figure(filter_plots.draw(record["filters"], title), out / f"{name}-filters")


def picture_title(record: dict[str, Any]) -> str:
    """Lines short enough to stand beside the legend of one column of panels."""
    title = f"{record['figure']}, {record['scale']} scale"
    every = [x for kind in ("positive", "negative") for x in record["controls"][kind]]
    failed = dict.fromkeys(x["row"] for x in every if not x["passed"])
    return f"{title}\ncontrol failed: {', '.join(failed)}" if failed else title


def tests(run: Run, record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Length or width -> what the test found there, with items in proportion to the length."""
    found = record["tests"]
    if run.across == "lengths":
        return {test["seq_len"]: test for name, test in found.items() if "," not in name}
    return {run.cell.d_model if run.across == "width" else run.cell.seq_len: found[TRAINED]}


def fixed_tests(run: Run, record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Length -> the test with as many items as in training, from the trained length on."""
    every = record["tests"] if run.across == "lengths" else {}
    found = {test["seq_len"]: test for name, test in every.items() if "," in name}
    return {run.cell.seq_len: every[TRAINED], **found} if found else {}


def generated_tests(run: Run, record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """As `tests`, of those with a model's own answers fed back: their accuracy is that one."""
    return {
        x: {"accuracy": test["free_running_accuracy"]}
        for x, test in tests(run, record).items()
        if "free_running_accuracy" in test
    }


def points(name: str = "accuracy", of: Any = tests) -> Points:
    """Return what a picture shows of a run: where -> one number of the test there, if it has it."""

    def found(run: Run, record: dict[str, Any]) -> dict[int, float]:
        return {x: test[name] for x, test in of(run, record).items() if name in test}

    return found


def controls(rows: Rows) -> dict[str, Any]:
    """Check that a model learned each row's task, and models without mixing stayed at chance.

    Positive: the mean over seeds is at least 0.99 at the row's largest length and width, or at
    each width of a figure across them, trained as all are. Negative: at most five standard
    deviations of a guesser's accuracy above chance.
    """
    of_row: dict[tuple[str, int], list[tuple[Run, dict[str, Any]]]] = {}
    for run, record in rows:
        if run.row == CONTROL:
            of_row.setdefault((run.column, run.cell.d_model), []).append((run, record))
    nothing: dict[Any, tuple[Run, dict[str, Any]]] = {}
    for run, record in rows:
        if run.line == NEGATIVE:  # a cell in two places of a figure is one control
            nothing.setdefault(run.cell, (run, record))
    return {
        "positive": [_positive(row, runs) for (row, _), runs in of_row.items()],
        "negative": [x for found in nothing.values() for x in _negative(*found)],
    }


def _positive(row: str, runs: Rows) -> dict[str, Any]:
    run, first = runs[0]
    accuracies = [record["accuracy"] for _, record in runs]
    mean = statistics.fmean(accuracies)
    return {
        "row": row,
        "mixer": run.line,
        "layers": first["layers"],
        "task": run.cell.task,
        "d_model": run.cell.d_model,
        "seq_len": run.cell.seq_len,
        "accuracy": mean,
        "min": min(accuracies),
        "at_least": CONTROL_AT_LEAST,
        "passed": mean >= CONTROL_AT_LEAST,
    }


def _negative(run: Run, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hold the control against chance in each of its tests."""
    found, tasks = [], run.cell.tests()
    apart: dict[Any, str] = {}
    for name in record["tests"]:
        apart.setdefault(tasks[name], name)  # two may be on the same rows
    for task, name in apart.items():
        accuracy = record["tests"][name]["accuracy"]
        labels = generate(task, 1, seed=0, split="test").labels
        answers = run.cell.test_examples * int((labels != IGNORE_INDEX).sum())
        spread = math.sqrt(task.chance * (1 - task.chance) / answers)
        most = min(task.chance + _DEVIATIONS * spread, 1.0)
        found.append(
            {
                "row": run.row,
                "column": run.column,
                "seq_len": task.seq_len,
                "test": name,
                "accuracy": accuracy,
                "chance": task.chance,
                "at_most": most,
                "passed": math.isfinite(accuracy) and accuracy <= most,
            }
        )
    return found
