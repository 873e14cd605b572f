"""What every study must do: unique cells, controls, contrasts of lines that exist, its report."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest

from eval import records
from eval import study as command
from eval.lab import cell as cells
from eval.lab import estimate
from eval.lab.contrasts import compute, half_width
from eval.lab.grid import LADDER
from eval.lab.page import report
from eval.lab.places import CONTROL, NEGATIVE, TUNING_SEED
from eval.lab.run import pictures
from eval.lab.study import StudyOptions
from eval.language import cell as language
from eval.language import grids
from eval.studies import STUDIES, landmark
from tests.calls import call_main

SCALES = [(name, scale) for name in STUDIES.names() for scale in STUDIES.get(name).scales]
RECORDS = {
    file.stem: record
    for file, record in records.read_records(records.FOLDER)
    if isinstance(record, dict) and "study" in record
}
each_record = pytest.mark.parametrize("name", RECORDS)


@pytest.fixture
def texts(monkeypatch, tiny_corpus):
    """The tiny corpus passes for text that holds out enough."""
    monkeypatch.setattr(grids, "texts", lambda *_, **__: ((str(tiny_corpus), "fingerprint"),))
    monkeypatch.setattr(landmark, "texts", grids.texts)
    monkeypatch.setattr(grids, "_check_texts", lambda *_: None)
    manifest = {"splits": {"validation": {"tokens": 10**6}}}
    monkeypatch.setattr(landmark, "read_manifest", lambda folder: manifest)


def places(name: str, scale: str, **asked):
    return STUDIES.get(name).places(StudyOptions(scale, **asked))


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_cells_have_unique_stable_keys_and_rates_of_other_seeds(name, scale, texts, tmp_path):
    try:
        found = places(name, scale)
    except Exception as error:
        assert "is read from official files alone" in str(error)
        return
    by_file: dict = {}
    for place in found:
        cell = place.run.cell
        assert by_file.setdefault(cells.cell_path(tmp_path, cell), cell) == cell
        assert cells.cell_path(tmp_path, replace(cell)) == cells.cell_path(tmp_path, cell)
        assert list(place.rates) == sorted(set(place.rates)) and place.seeds < TUNING_SEED
        for run in (*place.tried_at(place.rates[0]), place.at(1.0, 1), place.at(1.0, 2)):
            by_file.setdefault(cells.cell_path(tmp_path, run.cell), run.cell)
        assert json.loads(json.dumps(cell.key()))
    assert len(by_file) == len(set(by_file.values()))
    spots = [(p.run.row, p.run.column, p.run.line, p.run.cell) for p in found]
    assert len(set(spots)) == len(spots)
    if len(found[0].rates) > 1:
        assert set(found[0].rates) <= set(LADDER)


@pytest.mark.parametrize("name", STUDIES.names())
def test_controls_are_present(name, texts):
    """No mixing in every panel of a task; blocks drawn, and the nearest, where they are chosen."""
    runs = [place.run for place in places(name, STUDIES.get(name).scales[0])]
    panels = {(run.row, run.column) for run in runs if run.row != CONTROL}
    study = STUDIES.get(name)
    if name == "landmark":
        assert {"random", "local", "oracle"} <= {run.line for run in runs}
    elif name == "mamba":
        assert {run.line for run in runs if run.row == CONTROL} == {"attention", NEGATIVE}
    elif study.figure == "curves":
        negative = {(run.row, run.column) for run in runs if run.line == NEGATIVE}
        assert negative == panels
    else:  # a baseline without the mechanism stands in each panel
        baselines = {run.line for run in runs} & {"no filters", "Pythia", "attention", "Vanilla"}
        assert baselines or any("plain" in run.line or "Pythia" in run.line for run in runs)


@pytest.mark.parametrize("name", STUDIES.names())
def test_contrasts_name_lines_that_exist(name, texts):
    study = STUDIES.get(name)
    runs = [p.run for p in places(name, study.scales[0]) if p.run.row != CONTROL]
    lines = []
    for run in runs:
        place = {"row": run.row, "column": run.column, "line": run.line, "also": {}}
        if name in ("mamba", "streams", "landmark") or study.figure == "curves":
            lines.append(place | {"x": run.cell.seq_len})
        else:
            lines += [place | {"column": grids.TRAINED, "x": n} for n in run.cell.lengths]
    if name == "width":
        lines = [line | {"x": run.cell.d_model} for line, run in zip(lines, runs, strict=True)]
    lines = [line | {"runs": {"0": 1.0, "1": 2.0}} for line in lines]
    found = study.contrasts(lines)
    assert found
    names = [(one.row, one.column, one.x, one.name) for one in found]
    assert len(set(names)) == len(names)
    for one in found:
        sides = [x["runs"] for x in (*one.plus, *one.minus)]
        assert all(any(runs is line["runs"] for line in lines) for runs in sides)
        assert len(one.plus) == len(one.minus) and one.plus != one.minus


@pytest.mark.parametrize("name", STUDIES.names())
def test_estimate_works(name, texts, tmp_path, monkeypatch, capsys):
    """Timings are given; each of the study's cells is counted, and nothing is written."""
    monkeypatch.setattr(estimate, "step_seconds", lambda *_: (0.5, 0.25))
    monkeypatch.setattr(cells.Cell, "step", lambda *_: None)
    monkeypatch.setattr(language, "_speed", lambda *_: (1e5, 1.0))
    monkeypatch.setattr(grids, "_check_sizes", lambda *_: None)  # is of another vocabulary
    if name != "maps":  # counting is slow
        monkeypatch.setattr("cat_lm.counts.flops_per_token", lambda model, length: length)
        monkeypatch.setattr("cat_lm.training.estimate.meta_model", lambda *_: None)
    monkeypatch.setattr(language, "_SPEEDS", {})
    words = (name, "--scale", STUDIES.get(name).scales[0], "--out", tmp_path / "out")
    words += ("--estimate-only", "--workers", 2, "--device", "cpu")
    code, out, err = call_main(command.main, monkeypatch, capsys, "eval.study", *words)
    assert code == 0, err
    assert " to do\n" in out and "h with 2 at once" in out and "hours by mixer: " in out
    assert not (tmp_path / "out").exists()


@each_record
def test_report_is_as_its_record_says(name):
    record = RECORDS[name]
    text = report(STUDIES.get(record["study"]), record, name)
    page = (records.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    note = records.FOLDER / f"{name}.note.md"
    assert page.startswith(text) and (page == text) == (not note.exists())


@each_record
def test_intervals_follow_from_the_runs_of_a_record(name):
    record = RECORDS[name]
    study = STUDIES.get(record["study"])
    lines = [line for line in record["lines"] if line["row"] != CONTROL]
    found = compute(study.contrasts(lines), by_row=study.by_row)
    there = {(x["row"], x["column"], x["x"], x["contrast"]): x for x in record["contrasts"]}
    assert len(found) == len(record["contrasts"])
    assert bool(found) == any(len(line["runs"]) > 1 for line in lines)
    for one in found:  # errors over documents are kept, not the documents
        kept = there[one["row"], one["column"], one["x"], one["contrast"]]
        if kept["document_error"] is not None:
            errors = one["seed_error"], one["n"], kept["document_error"], kept["documents"]
            half = half_width(*errors, one["comparisons"])
            one["low"], one["high"] = one["mean"] - half, one["mean"] + half
        for key in ("mean", "low", "high"):
            assert one[key] == pytest.approx(kept[key], abs=1e-9, nan_ok=True), one["contrast"]
        assert (one["n"], one["comparisons"]) == (kept["n"], kept["comparisons"])


@each_record
def test_figure_shows_every_run(name):
    record = RECORDS[name]
    study = STUDIES.get(record["study"])
    figure = pictures(study, record)[""]
    lines = [line for line in record["lines"] if line["row"] != CONTROL]
    panels = [axes for axes in figure.axes if axes.lines or axes.collections]
    places = {(x["row"], x["column"]) for x in lines}
    expected = len({row for row, _ in places}) if study.figure == "strips" else len(places)
    if study.figure == "losses":  # strips at the trained length, and curves
        trained = record["extra"]["training_length"]
        at = {
            place: {x["x"] for x in lines if (x["row"], x["column"]) == place} for place in places
        }
        expected = sum((trained in found) + (len(found) > 1) for found in at.values())
    assert len(panels) == expected
    drawn = sum(len(c.get_offsets()) for axes in panels for c in axes.collections)
    points = [m for axes in panels for m in axes.lines if m.get_linestyle() == "None"]
    drawn += sum(len(m.get_xdata()) for m in points if m.get_marker() != "|")
    said = sum(text.get_text().count(",") + 1 for axes in panels for text in axes.texts)
    every = sum(v is not None and math.isfinite(v) for x in lines for v in x["runs"].values())
    assert drawn + said >= every > 0


@pytest.mark.parametrize("name", ["long_range_smnist_cpu", "streams_cpu", "recall_mamba_cpu"])
def test_diverged_run_is_named_and_leaves_no_interval(name):
    record = copy.deepcopy(RECORDS[name])
    study = STUDIES.get(record["study"])
    line = next(x for x in record["lines"] if x["row"] != CONTROL)
    line["runs"]["0"] = None
    record["diverged"] = [{k: line[k] for k in ("row", "column", "line")} | {"seed": 0}]
    text = report(study, record, name)
    assert "Diverged" in text and f"diverged (1 of {len(line['runs'])})" in text
    lines = [x for x in record["lines"] if x["row"] != CONTROL]
    for contrast, one in zip(study.contrasts(lines), compute(study.contrasts(lines)), strict=False):
        if any(x is line for x in (*contrast.plus, *contrast.minus)):
            assert one["low"] is None
