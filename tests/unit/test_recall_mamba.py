"""When Mamba learns to recall: the study's grid, its numbers and its page."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from eval.common.grids import cells, execution
from eval.recall import __main__ as command
from eval.recall.grids import mamba
from eval.recall.grids.plan import Run
from eval.recall.train.cell import Cell


def test_the_grid_has_every_dropout_start_rate_and_seed_once():
    for scale in mamba.SCALES.values():
        runs = mamba.plan(scale)
        assert len({run.cell for run in runs}) == len(runs)
        places = len(scale.lengths) * len(scale.rates) * scale.seeds
        for dropout in (0.0, 0.1):
            for start in ("own", "zoology"):
                there = [
                    run.cell
                    for run in runs
                    if run.line == f"dropout {dropout:g}, start {start}"
                    and run.cell.embedding_dropout == dropout
                    and run.cell.resolved()["mixer"]["options"]["init"] == start
                ]
                assert len(there) == places
        assert len(runs) == 4 * places
    assert len(mamba.SCALES["cpu"].rates) >= 3
    more = mamba.plan(mamba.SCALES["cpu"], seeds=5)
    assert {run.cell for run in more} > {run.cell for run in mamba.plan(mamba.SCALES["cpu"])}
    one = mamba.plan(mamba.SCALES["cpu"], rates=(1e-2,))
    assert {run.cell.lr for run in one} == {1e-2} and {r.cell for r in one} < {r.cell for r in more}


def record_of(curve: list[float], accuracy: float, start: str = "own") -> dict:
    history = [{"step": 10 * i, "accuracy": a} for i, a in enumerate(curve, start=1)]
    return {
        "history": history,
        "accuracy": accuracy,
        "steps": 10 * len(curve),
        "mixer": {"options": {"init": start}},
    }


@pytest.fixture
def lines() -> list[dict]:
    """Two rates; a run that finds the task, one that finds and loses it, two that never do."""
    found = [
        (1e-2, 0, record_of([0.1, 0.2, 0.95, 0.99], 0.98)),
        (1e-2, 1, record_of([0.91, 0.1], 0.1)),
        (1e-2, 2, record_of([0.1, 0.9], 0.5)),  # not above
        (1e-3, 0, record_of([0.1], 0.125)),
    ]
    cell = Cell("mqar", "mamba", 16, 16, embedding_dropout=0.0)
    return mamba.summary(
        [
            (Run("L = 16", f"{rate:g}", "", dataclasses.replace(cell, lr=rate, seed=seed)), record)
            for rate, seed, record in found
        ]
    )


def test_a_run_is_over_its_plateau_where_it_is_first_above(lines):
    assert [line["found_at_step"] for line in lines] == [30, 10, None, None]
    assert [line["accuracy"] for line in lines] == [0.98, 0.1, 0.5, 0.125]
    assert lines[0]["curve"][2] == (30, 0.95)


def test_the_page_tells_how_many_and_when(lines):
    told = mamba.markdown(lines)
    assert "| dropout | start | rate 0.001 | rate 0.01 |" in told
    assert "| 0 | own | 0 of 1; 0.12 to 0.12 | 2 of 3, 20 (10 to 30); 0.10 to 0.98 |" in told


def test_the_picture_has_a_curve_for_each_run(lines):
    dropped = [{**line, "dropout": 0.1, "start": "zoology"} for line in lines]
    axes = mamba.draw(lines + dropped).axes
    assert [a.get_title(loc="left") for a in axes] == ["L = 16, rate 0.001", "L = 16, rate 0.01"]
    assert [len(a.lines) for a in axes] == [2, 6]
    assert axes[0].lines[0].get_linestyle() != axes[0].lines[1].get_linestyle()
    assert axes[0].lines[0].get_color() != axes[0].lines[1].get_color()
    curve = axes[1].lines[0].get_xydata().tolist()
    assert curve == [[10, 0.1], [20, 0.2], [30, 0.95], [40, 0.99]]


def test_the_command_estimates_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    small = {"rates": (1e-2,), "examples": 64, "epochs": 1, "lengths": (8,)}
    monkeypatch.setitem(mamba.SCALES, "smoke", dataclasses.replace(mamba.SCALES["smoke"], **small))
    ran = []

    def in_this_process(groups, out, device, workers):
        for run in (run for group in groups for run in group):
            ran.append(run.cell)
            cells.run(out, run.cell, device, quiet=True)

    monkeypatch.setattr(execution, "execute", in_this_process)
    monkeypatch.setattr(mamba, "save_figure", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> None:
        how = ("--scale", "smoke", "--out", "out", "--device", "cpu", *words)
        monkeypatch.setattr(sys, "argv", ["eval.recall", "mamba", *how])
        command.main()

    run("--estimate-only")
    assert "4 runs, 4 to do" in capsys.readouterr().out and not ran
    assert not Path("out/mamba.json").exists()
    run()
    record = json.loads(Path("out/mamba.json").read_text())
    assert len(record["lines"]) == len(ran) == 4
    assert {(x["dropout"], x["start"]) for x in record["lines"]} == {
        (dropout, start) for dropout in mamba.DROPOUTS for start in mamba.STARTS
    }
    os.remove(cells.cell_path(Path("out"), ran[0]))
    lost = ran.pop(0)
    ran.clear()
    run()
    assert ran == [lost]
    run("--seeds", "2")
    assert "8 runs, 4 to do" in capsys.readouterr().out and len(ran) == 5
