"""Figures: the grids are the paper's, a run restarts where it stopped, all points are shown."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from cat_lm.errors import UserError
from eval.recall import cells, grid
from eval.recall.__main__ import FIGURES as NAMES
from eval.recall.execution import Execution
from eval.recall.mixers import make_mixer
from eval.recall.plan import FIGURES, NEGATIVE, SCALES, plan


def test_the_command_offers_the_figures_that_there_are():
    assert tuple(NAMES) == tuple(FIGURES)


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
    assert all(run.cell.layers == 1 for run in plan("one-layer", SCALES["paper"])[:-1])
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
    for run in runs[1:]:  # all but one are there already
        cells.run(tmp_path, run.cell, "cpu", quiet=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    record = grid.figure(name, "smoke", tmp_path, Execution("cpu", workers=1))
    said = capsys.readouterr().out
    assert f"{len(runs)} runs, 1 to do" in said and "hours" in said and "positive control" in said
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert len(list((tmp_path / "cells").iterdir())) == len(runs)
    assert json.loads((tmp_path / f"{name}.json").read_text())["lines"] == record["lines"]
    cat = [line for line in record["lines"] if line["mixer"] == "cat"]
    assert [line["seq_len"] for line in cat] == ([16] if name == "accuracy" else [16, 32])
    for line in cat:
        (values,) = line["runs"].values()
        assert len(values) == 2
        assert line["mean"] == sum(values) / 2 and line["best_of_all"] == max(values)
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_the_best_rate_is_by_mean_and_its_edge_is_told():
    run = small("accuracy")[0]

    def row(lr: float, seed: int, accuracy: float):
        cell = replace(run.cell, lr=lr, seed=seed)
        return replace(run, cell=cell), {"best_accuracy": accuracy}

    rows = [row(0.1, 0, 0.9), row(0.1, 1, 0.1), row(0.2, 0, 0.7), row(0.2, 1, 0.6), row(0.3, 0, 0)]
    (line,) = grid.summary(rows)
    assert line["best_lr"] == 0.2 and not line["best_lr_on_grid_edge"]
    assert (line["min"], line["max"], line["best_of_all"]) == (0.6, 0.7, 0.9)
    assert grid.summary(rows[:4])[0]["best_lr_on_grid_edge"]
