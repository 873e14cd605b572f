"""Run a study: train what is missing, and write OUT/NAME.json, .md, .csv and the pictures.

All that a report shows is in its JSON, from which `python -m eval.records render` makes it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.files import replace_nonfinite, write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, result_files
from eval.common.interrupts import lock_folder
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.lab.contrasts import compute
from eval.lab.execution import Execution
from eval.lab.figures import draw
from eval.lab.frame import Found, Line, diverged_runs, frame, gather_lines, origin_of
from eval.lab.grid import all_records, planned_runs, run_tuned
from eval.lab.page import report, warnings
from eval.lab.places import CONTROL, TUNING_SEED, Place
from eval.lab.study import Study, StudyOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_study(
    study: Study, asked: StudyOptions, out: Path, execution: Execution
) -> dict[str, Any] | None:
    """Estimate the time, run what is not finished, and write the study's files.

    Returns:
        The record, or None after an estimate alone.

    Raises:
        UserError: what is asked does not fit, or another study works in OUT.
    """
    places = study.places(asked)
    # An estimate may read a folder that another call is using.
    with nullcontext() if execution.estimate_only else lock_folder(out):
        if not execution.estimate_only:
            claim_outputs(
                out, f"{study.name}.json", result_files(study.name, ".md", ".csv", *PICTURES)
            )
        if study.check is not None:
            study.check([run.cell for run in planned_runs(places, out)], out)
        found = run_tuned(f"{study.name} at {asked.scale} scale", places, out, execution)
        if found is None:
            return None
        if study.check is not None:
            study.check([run.cell for run, _, _ in found], out)
        record, lines = summarise(study, asked, places, found)
        record["trained"] = origin_of(all_records(places, out))
        write_study(study, record, lines, out)
    return record


def summarise(
    study: Study, asked: StudyOptions, places: Sequence[Place], found: Found
) -> tuple[dict[str, Any], list[Line]]:
    """Return the record of finished runs, and its lines with the values of their documents."""
    rows = [(run, record) for run, record, _ in found]
    lines = gather_lines(found, study.values)
    shown = [line for line in lines if line["row"] != CONTROL]
    known, there = (
        _names(of) for of in (study.places(StudyOptions(asked.scale, more=asked.more)), places)
    )
    record = {
        "format": 1,
        "study": study.name,
        "scale": asked.scale,
        "tuning_seed": TUNING_SEED,
        "not_run": [name for name in known if name not in there],
        "controls": [
            dataclasses.asdict(control) | {"passed": control.passed}
            for control in study.controls(rows)
        ],
        "lines": [{k: v for k, v in line.items() if k != "documents"} for line in lines],
        "contrasts": compute(study.contrasts(shown), by_row=study.by_row),
        "extra": study.extra(rows),
        "diverged": diverged_runs(lines),
        **provenance(),
    }
    return replace_nonfinite(record), lines


def write_study(study: Study, record: dict[str, Any], lines: Sequence[Line], out: Path) -> None:
    """Write a record, its report, the frame of its runs and its picture."""
    name = record["study"]
    write_text(out / f"{name}.md", report(study, record))
    write_text(out / f"{name}.csv", frame(lines).to_csv(index=False))
    for ending, picture in pictures(study, record).items():
        save_figure(picture, out / f"{name}{ending}")
    write_json(out / f"{name}.json", record)
    for line in warnings(record):
        print(line)


def pictures(study: Study, record: dict[str, Any]) -> dict[str, Figure]:
    """Draw a record's pictures, by file name suffix; the figure's suffix is empty."""
    more = study.pictures(record)
    return {"": draw(study, record)} | {f"-{ending}": picture for ending, picture in more.items()}


def _names(places: Sequence[Place]) -> list[str]:
    """Return the names of a report's lines, rows and columns, in their order."""
    runs = [place.run for place in places if place.run.row != CONTROL]
    names = [[getattr(run, part) for run in runs] for part in ("line", "row", "column")]
    return list(dict.fromkeys(name for part in names for name in part if name))
