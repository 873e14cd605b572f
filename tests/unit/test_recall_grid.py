"""Figures: the grids are the paper's, a run restarts where it stopped, all points are shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from cat_lm.errors import UserError
from cat_lm.mixers import make_mixer
from eval.recall.grids import figure as grid
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import GRIDS, NEGATIVE, SCALES, plan
from eval.recall.train import cells
from eval.recall.train.execution import Execution


def test_every_figure_has_a_grid_and_every_grid_a_figure():
    assert {figure.grid for figure in FIGURES.values()} == set(GRIDS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FIGURES)
def test_every_cell_of_every_grid_fits(name, scale):
    runs = plan(name, SCALES[scale])
    for run in runs:
        task = run.cell.make_task()
        make_mixer(run.cell.mixer)
        for length in run.cell.test_lengths:
            task.at_length(length)
    assert len({run.cell for run in runs}) == len(runs)
    assert runs[-1].line == "attention" and runs[-1].cell.layers == 2
    panels = {(run.row, run.column) for run in runs[:-1]}
    controls = {(run.row, run.column) for run in runs if run.line == NEGATIVE}
    assert panels == controls


def test_the_papers_grids():
    accuracy = plan("accuracy", SCALES["paper"])
    cat = [run.cell for run in accuracy if run.line == "cat" and run.row == "MQAR"]
    assert Counter(cell.seq_len for cell in cat) == dict.fromkeys((64, 128, 256, 512), 27)
    assert {cell.make_task().num_keys for cell in cat} == {16, 32, 64, 128}
    assert {cell.lr for cell in cat} == {1e-3, 1e-2, 1e-1} and {c.seed for c in cat} == {0, 1, 2}
    bigram = [run.cell for run in accuracy if run.row == "MQNAR"]
    assert {cell.train_examples for cell in bigram} == {200_000}
    length = [r.cell for r in plan("length", SCALES["paper"]) if r.line == "mamba"]
    assert len({cell.lr for cell in length}) == 5 and len({cell.seed for cell in length}) == 5
    assert length[0].test_lengths == (32, 64, 128, 256, 512, 1024)
    one_layer = [run.cell for run in plan("one-layer", SCALES["paper"])[:-1]]
    assert all((cell.layers or make_mixer(cell.mixer).layers) == 1 for cell in one_layer)
    # What has one layer anyway is the same run in both figures.
    assert {r.cell for r in accuracy if r.line in ("cat", "lincat")} <= set(one_layer)
    with pytest.raises(UserError, match="choose one of"):
        plan("accuracies", SCALES["paper"])


def small(name: str):
    """Two mixers and one length of the smoke grid, at two seeds."""
    scale = replace(SCALES["smoke"], lengths=(16,), examples=128, epochs=1, seeds=2, length_seeds=2)
    runs = [run for run in plan(name, scale) if run.row in ("MQAR", "control")]
    runs = [run for run in runs if run.line in ("cat", "attention", NEGATIVE)]
    return [replace(run, cell=replace(run.cell, test_examples=40)) for run in runs]


@pytest.mark.parametrize("name", ["accuracy", "length"])
def test_a_figure_runs_restarts_and_shows_every_run(name, tmp_path, monkeypatch, capsys):
    runs = small(name)
    monkeypatch.setattr(grid, "plan", lambda *_: runs)
    todo = int(name == "length")  # one once: processes start slowly
    for run in runs[todo:]:
        cells.run(tmp_path, run.cell, "cpu", quiet=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    record = grid.figure(name, "smoke", tmp_path, Execution("cpu", workers=1))
    said = capsys.readouterr().out
    assert (
        f"{len(runs)} runs, {todo} to do" in said and "hours" in said and "positive control" in said
    )
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert len(list((tmp_path / "cells").iterdir())) == len(runs)
    assert json.loads((tmp_path / f"{name}.json").read_text())["lines"] == record["lines"]
    cat = [line for line in record["lines"] if line["mixer"] == "cat"]
    assert [line["seq_len"] for line in cat] == ([16] if name == "accuracy" else [16, 32])
    for line in cat:
        (values,) = line["runs"].values()
        assert len(values) == 2
        assert line["mean"] == sum(values) / 2 and line["best_of_all"] == max(values)
    page = (tmp_path / f"{name}.md").read_text()
    pictures = re.findall(r"\]\((.*?)\)", page)
    fixed = [f"{name}-fixed.png"] * (name == "length")
    assert pictures == [f"{name}.png", *fixed, f"{name}-filters.png"]
    assert all((tmp_path / picture).stat().st_size > 5000 for picture in pictures)
    # What spoils the comparison comes first.
    assert page.split("\n\n")[1].startswith("> **The positive control failed")
    assert all(
        f"`{line['mixer']}` | {line['seq_len']} | {line['mean']:.4f}" in page for line in cat
    )
    assert record["provenance"]["command"] in page
    assert "positive control failed" in (tmp_path / f"{name}.svg").read_text()
    assert "> **The positive control failed" not in said and "The positive control failed" in said
    (control,) = record["controls"]["negative"]
    assert control["chance"] == 1 / 32 < control["at_most"] < 0.12


def with_rate(run, lr: float, accuracy: float):
    return replace(run, cell=replace(run.cell, lr=lr)), {"best_accuracy": accuracy}


def test_the_best_rate_is_by_mean_and_its_edge_is_told():
    run = small("accuracy")[0]
    found = {0.2: (0.7, 0.6), 0.1: (0.9, 0.1, 0.5), 0.3: (0.0,)}  # not in order, seeds differ
    rows = [with_rate(run, lr, value) for lr, values in found.items() for value in values]
    (line,) = grid.summary(rows, grid.points)
    assert line["best_lr"] == 0.2 and not line["best_lr_on_grid_edge"]
    assert (line["min"], line["max"], line["best_of_all"]) == (0.6, 0.7, 0.9)
    assert line["mean"] == pytest.approx(0.65)
    assert line["runs"] == {f"{lr:g}": list(values) for lr, values in found.items()}
    parts = (rows[:2] + rows[5:], rows[:5])
    (lowest,), (highest,) = (grid.summary(part, grid.points) for part in parts)
    assert lowest["best_lr"] == highest["best_lr"] == 0.2
    assert lowest["best_lr_on_grid_edge"] and highest["best_lr_on_grid_edge"]
    assert not grid.summary(rows[:2], grid.points)[0]["best_lr_on_grid_edge"]  # no grid


def test_every_place_of_a_figure_has_a_line_of_its_own():
    run = small("accuracy")[0]
    other = replace(run, cell=replace(run.cell, seq_len=32))
    runs = [run, replace(run, row="x"), replace(run, column="x"), replace(run, line="x"), other]
    rows = [(run, {"best_accuracy": number / 8}) for number, run in enumerate(runs)]
    lines = grid.summary(rows, grid.points)
    assert [line["best_of_all"] for line in lines] == [number / 8 for number in range(5)]
    places = [(x["row"], x["column"], x["mixer"], x["seq_len"]) for x in lines]
    assert places == [(r.row, r.column, r.line, r.cell.seq_len) for r in runs]


def test_points_are_the_lengths_of_the_tests():
    run = small("length")[0]
    tests = {"trained length": (16, 0.9), "length 8": (8, 0.8), "length 32": (32, 0.5)}
    tests["length 32, 4 keys"] = (32, 0.7)
    tests = {name: {"seq_len": x, "accuracy": y} for name, (x, y) in tests.items()}
    record = {"best_accuracy": 0.95, "accuracy": 0.85, "tests": tests}
    assert grid.points(run, record) == {8: 0.8, 16: 0.9, 32: 0.5}
    assert grid.fixed_points(run, record) == {16: 0.9, 32: 0.7}
    trained = replace(run, across_tests=False)
    assert grid.points(trained, record) == {16: 0.95} and not grid.fixed_points(trained, record)
    del tests["length 32, 4 keys"]
    assert not grid.fixed_points(run, record)


def test_controls_are_measured_against_their_limits():
    runs = [run for run in small("accuracy") if run.line in (NEGATIVE, "attention")]
    runs = [run for run in runs if run.line == NEGATIVE or run.row == "control"]
    rows = [(run, {"best_accuracy": 0.3}) for run in runs]
    found = grid.controls(rows)
    assert not found["positive"]["passed"] and not found["negative"][0]["passed"]
    # 40 rows of 4 answers: five deviations of a guesser with chance 1/32.
    assert found["negative"][0]["at_most"] == pytest.approx(1 / 32 + 5 * (31 / 32**2 / 160) ** 0.5)
    rows = [(runs[0], {"best_accuracy": 0.03}), (runs[1], {"best_accuracy": 0.995})]
    found = grid.controls(rows)
    assert found["positive"]["passed"] and found["negative"][0]["passed"]
    # Every place has its own; a guesser's luck is at most all answers.
    cell = replace(runs[0].cell, task="mqar:keys=2,vocab_size=8", test_examples=1)
    negative = [runs[0], replace(runs[0], row="MQNAR", column="d = 9", cell=cell)]
    found = grid.controls([(run, {"best_accuracy": 0.1}) for run in (*negative, runs[1])])
    places = [(x["row"], x["column"], x["seq_len"], x["passed"]) for x in found["negative"]]
    assert places == [("MQAR", "d = 16", 16, True), ("MQNAR", "d = 9", 16, True)]
    assert [x["chance"] for x in found["negative"]] == [1 / 32, 1 / 4]
    assert found["negative"][1]["at_most"] == 1.0
