"""`python -m eval.long_range figure`: runs a grid, checks its controls, draws and tells it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import finite, write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.common.grids import pictures
from eval.common.grids.execution import Execution, alone_in
from eval.common.grids.places import CONTROL, Run
from eval.common.grids.summary import differences, diverged, summary, training
from eval.common.grids.tuning import Choice as Rate
from eval.common.grids.tuning import all_records, foreseen, run_tuned
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.long_range import page
from eval.long_range.catalog import FIGURES
from eval.long_range.controls import Rows, controls
from eval.long_range.origins import check_data_there, check_same_data
from eval.long_range.plan import SCALES, Choice, place_on_axis, plan

_SHARE = 0.9  # of the best line, which steps are counted to


def figure(
    name: str,
    scale_name: str,
    out: Path,
    execution: Execution,
    choice: Choice,
    seeds: int | None = None,
    models: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes OUT/NAME.json, .md, .png and .svg.

    Args:
        seeds: runs of each model, in place of the scale's.
        models: mixers, in place of the scale's; the controls are always there.

    Returns:
        What OUT/NAME.json got, or none after an estimate alone.

    Raises:
        UserError: a task is read from official files alone, and `choice` has no folder of them.
    """
    scale = SCALES[scale_name]
    scale = scale.with_models(name, models) if models else scale
    scale = replace(scale, seeds=seeds, seeds_of={}) if seeds is not None else scale
    points = plan(name, scale, choice)
    tasks = [point.run.cell.make_task() for point in points]
    needing = {task.name for task in tasks if task.needs_folder}
    if needing and choice.place.folder is None:
        raise UserError(
            f"--data: {', '.join(sorted(needing))} is read from official files alone; name their "
            "folder, or choose other tasks with --rows"
        )
    with alone_in(out, execution):
        if not execution.estimate_only:
            claim_outputs(out, f"{name}.json", named(name, ".md", *PICTURES))
        check_data_there(out, [run.cell for run in foreseen(points, out)])
        found = run_tuned(f"{name} at {scale_name} scale", points, out, execution)
    if found is None:
        return None
    rows = [(run, record) for run, record, _ in found]
    check_same_data(rows, out)
    record = told(name, scale_name, found)
    record |= {
        "protocol": choice.protocol,
        "is_causal": choice.is_causal,
        "trained": training(all_records(points, out)),
        "provenance": provenance(),
    }
    drawing = pictures.draw(
        rows,
        lambda run, found: {place_on_axis(run, found): found["value"]},
        picture_title(record),
        axis=FIGURES[name].axis,
        measure=record["metric"],
    )
    save_figure(drawing, out / name)
    write_text(out / f"{name}.md", page.markdown(record))
    write_json(out / f"{name}.json", finite(record))  # a model may diverge
    for line in page.warnings(record):
        print(line)
    return record


def told(
    name: str, scale_name: str, found: Sequence[tuple[Run, dict[str, Any], Rate]]
) -> dict[str, Any]:
    """Gather a figure's numbers, of runs with their records and rates."""
    rows = [(run, record) for run, record, _ in found]

    def tests(run: Run, record: dict[str, Any]) -> dict[int, dict[str, float]]:
        return {place_on_axis(run, record): {"accuracy": record["value"]}}

    lines = summary([each for each in found if each[0].row != CONTROL], tests)
    levels = add_steps(lines, rows)
    chunk = SCALES[scale_name].chunk
    pairs = [tuple(x.format(chunk=chunk) for x in pair) for pair in FIGURES[name].pairs]
    shown = {run.row: (run, record) for run, record in rows if run.row != CONTROL}
    return {
        "figure": name,
        "shows": FIGURES[name].shows,
        "number in the paper": FIGURES[name].number,
        "scale": scale_name,
        "metric": rows[0][1]["metric"],
        "controls": controls(rows),
        "lines": lines,
        "diverged": diverged((run, record["value"]) for run, record in rows),
        "differences": differences(lines, pairs),
        "tasks": {row: _task(*each) | {"level": levels[row]} for row, each in shown.items()},
        "seconds": round(sum(sum(record["seconds"].values()) for _, record in rows)),
    }


def _task(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    task, rows = run.cell.make_task(), {k: found["rows"] for k, found in record["data"].items()}
    return {
        "task": record["task"],
        "rows": rows,
        "counted": [task.counted(split, count) for split, count in rows.items()],
        "most_frequent": record["data"]["test"]["most_frequent"],
        "notes": record["notes"],
        "steps": record["steps"],
        "layers": record["layers"],
        "d_model": record["cell"]["d_model"],
    }


def add_steps(lines: Sequence[dict[str, Any]], rows: Rows) -> dict[str, float | None]:
    """Add to each line the steps of each seed until validation was at the level of its task.

    Returns:
        Each task's level, the same for all its lines: _SHARE of the largest mean of a test; None
        where that is not above 0.
    """
    best: dict[str, float] = {}
    for line in lines:
        best[line["row"]] = max(line["mean"], best.get(line["row"], -math.inf))
    levels = {row: _SHARE * mean if mean > 0 else None for row, mean in best.items()}
    found = {(r.row, r.line, place_on_axis(r, d), str(r.cell.seed)): d for r, d in rows}
    for line in lines:
        where, level = (line["row"], line["mixer"], line["x"]), levels[line["row"]]
        line["steps"] = {seed: steps_to(found[*where, seed], level) for seed in line["runs"]}
    return levels


def steps_to(record: dict[str, Any], level: float | None) -> int | None:
    """Count the steps until validation was at a level for the first time; None if it never was."""
    if level is None:
        return None
    return next((p["step"] for p in record["history"] if p["value"] >= level), None)


def picture_title(record: dict[str, Any]) -> str:
    """Name the figure, and what of its controls failed."""
    title = f"{record['figure']}, {record['scale']} scale"
    failed = [f"{x['row']} ({x['kind']})" for x in record["controls"] if not x["passed"]]
    return f"{title}\ncontrol failed: {', '.join(failed)}" if failed else title
