"""When Mamba learns to recall: the study's grid, its numbers and its page."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

from eval.common.comparison import t_quantile
from eval.common.grids import cells, execution
from eval.common.grids.tuning import TUNING_SEED, Choice
from eval.recall import __main__ as command
from eval.recall.grids import mamba
from eval.recall.grids.plan import Run
from eval.recall.train.cell import Cell


def test_the_grid_has_every_dropout_start_rate_and_seed_once():
    for scale in mamba.SCALES.values():
        runs = mamba.every_run(mamba.plan(scale))
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
    few, more, one = (
        mamba.every_run(mamba.plan(mamba.SCALES["cpu"], **how))
        for how in ({}, {"seeds": 5}, {"rates": (1e-2,)})
    )
    assert {run.cell for run in more} > {run.cell for run in few}
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
    told = mamba.tables({"lines": lines} | NOTHING)
    assert "| dropout | start | rate 0.001 | rate 0.01 |" in told
    assert "| 0 | own | 0 of 1; 0.12 to 0.12 | 2 of 3, 20 (10 to 30); 0.10 to 0.98 |" in told


NOTHING = {"chosen": [], "differences": [], "controls": [], "tuning_seed": 7}


def tuned(values: dict[tuple[float, str], tuple[int | None, ...]], row: str = "L = 16") -> list:
    """Runs at their chosen rates that find the task after so many tens of steps, as run_tuned gives
    them; one rate lies on the edge."""
    cell = Cell("mqar", "mamba", 16, 16)
    found = []
    for (dropout, start), tens in values.items():
        edge = Choice(3e-2, {1e-2: -9.0, 3e-2: -8.0}, True)
        choice = edge if (dropout, start) == (0.1, "own") else Choice(1e-2, {}, False)
        for seed, ten in enumerate(tens):
            changed = {"lr": choice.rate, "seed": seed, "embedding_dropout": dropout}
            run = Run(row, "", "", dataclasses.replace(cell, **changed))
            curve = [0.1] * 9 if ten is None else [0.1] * (ten - 1) + [0.95]
            found.append((run, record_of(curve, 0.99, start), choice))
    return found


VALUES = {
    (0.0, "own"): (10, 12, 11),
    (0.0, "zoology"): (10, 13, 11),
    (0.1, "own"): (41, 47, 45),
    (0.1, "zoology"): (40, 45, 9),
}


def test_dropout_and_start_are_compared_by_pairs_corrected_for_their_number():
    found = mamba.compared(tuned(VALUES))
    names = [(x["of"], x["less"]) for x in found["differences"]]
    assert names == [
        ("dropout 0.1, start own", "dropout 0, start own"),
        ("dropout 0.1, start zoology", "dropout 0, start zoology"),
        ("dropout 0, start zoology", "dropout 0, start own"),
        ("dropout 0.1, start zoology", "dropout 0.1, start own"),
    ]
    dropout, start = found["differences"][0], found["differences"][2]
    each = [math.log2(one / other) for one, other in ((41, 10), (47, 12), (45, 11))]
    assert dropout["mean"] == pytest.approx(sum(each) / 3)
    deviation = (sum((x - sum(each) / 3) ** 2 for x in each) / 2) ** 0.5
    half = t_quantile(1 - 0.025 / 4, 2) * deviation / 3**0.5
    assert dropout["high"] - dropout["mean"] == pytest.approx(half)
    assert (dropout["verdict"], start["verdict"]) == ("higher", "unclear")
    assert {x["comparisons"] for x in found["differences"]} == {4}
    both = mamba.compared([*tuned(VALUES), *tuned(VALUES, "L = 32")])["differences"]
    assert len(both) == 8 and both[0]["low"] < dropout["low"]  # of two lengths twice as many


def test_a_run_that_never_finds_the_task_leaves_no_interval():
    found = mamba.compared(tuned(VALUES | {(0.1, "own"): (41, None, 45)}))
    assert [x["low"] is None for x in found["differences"]] == [True, False, False, True]
    told = mamba.tables({"lines": []} | NOTHING | found)
    assert "| L = 16 | 0.1 | own | ≥ 0.03 | 410, never, 450 |" in told


def test_a_rate_is_chosen_by_when_it_finds_the_task():
    cell = mamba.plan(mamba.SCALES["cpu"])[0].run.cell
    scores = [
        cell.score(record_of(curve, 1.0) | {"validation": {"accuracy": curve[-1]}})
        for curve in ([0.95], [0.1, 0.95], [0.1, 0.8], [0.1, 0.2])
    ]
    assert scores == sorted(scores, reverse=True) and scores[0] - scores[1] == pytest.approx(1)


def test_controls_that_do_as_they_must_not_are_told_first():
    runs = mamba.controls(mamba.SCALES["cpu"])
    assert [run.line for run in runs] == ["attention", "none"]
    good = [mamba._control(runs[0], record_of([0.1, 0.99], 1.0))]
    good.append(mamba._control(runs[1], record_of([0.1, 0.1], 0.1)))
    assert all(x["passed"] for x in good)
    bad = [good[0], mamba._control(runs[1], record_of([0.95], 1.0))]
    told = mamba.tables({"lines": []} | NOTHING | {"controls": bad})
    assert told.startswith(
        "Controls, one run each. L = 16, none: found at step 10 (accuracy 1.000), and must not"
    )
    assert not mamba._control(runs[0], record_of([0.1], 0.1))["passed"]
    # One without numbers has found nothing, and shown nothing.
    assert not mamba._control(runs[1], record_of([-math.inf], -math.inf))["passed"]


def test_the_page_has_the_rates_that_were_chosen_and_marks_an_edge(lines):
    record = {"lines": lines} | NOTHING | mamba.compared(tuned(VALUES))
    told = mamba.tables(record)
    assert "| L = 16 | 0 | own | 0.01 | 100, 120, 110 |" in told
    assert "| L = 16 | 0.1 | own | ≥ 0.03 | 410, 470, 450 |" in told and "with seed 7" in told
    assert "In 1 of 4 rows it is the least or largest of those tried" in told
    first = (
        r"\| dropout 0.1, start own less dropout 0, start own \| \+2.013 \| \+1.\d+ to \+2.\d+ \|"
    )
    assert re.search(first + r" higher \|", told)
    assert "paired by seed over 3 seeds; 95% for all 4 intervals together" in told
    one = mamba.compared(tuned({line: found[:1] for line, found in VALUES.items()}))
    assert "Differences" not in mamba.tables(record | one)  # of one seed: no interval


def test_a_rate_that_some_lines_have_alone_leaves_the_others_a_place(lines):
    wider = [{**lines[0], "rate": 3e-2, "start": "zoology"}]
    record = {"lines": lines + wider} | NOTHING
    assert re.search(r"\| 0 \| own \| .* \| – \|$", mamba.tables(record), re.M)
    drawing = mamba.draw(lines + wider)
    labels = {text.get_text() for text in drawing.legends[0].get_texts()}
    assert labels == {"dropout 0, start own", "dropout 0, start zoology"}


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
    monkeypatch.setattr(execution, "hours_by_mixer", lambda groups, device: {"mamba": 0.1})
    monkeypatch.setattr(mamba, "save_figure", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> None:
        how = ("--scale", "smoke", "--out", "out", "--device", "cpu", *words)
        monkeypatch.setattr(sys, "argv", ["eval.recall", "mamba", *how])
        command.main()

    run("--estimate-only")
    assert "6 runs, 6 to do" in capsys.readouterr().out and not ran
    assert not Path("out/mamba.json").exists()
    run()
    record = json.loads(Path("out/mamba.json").read_text())
    assert len(record["lines"]) == len(ran) - 2 == 4
    told = Path("out/mamba.md").read_text()
    assert told.startswith("# mamba, at smoke scale\n\n`") and "Runs ended between" in told
    assert [x["mixer"] for x in record["controls"]] == ["attention", "none"]
    assert {(x["dropout"], x["start"]) for x in record["lines"]} == {
        (dropout, start) for dropout in mamba.DROPOUTS for start in mamba.STARTS
    }
    os.remove(cells.cell_path(Path("out"), ran[0]))
    lost = ran.pop(0)
    ran.clear()
    run()
    assert ran == [lost]
    run("--seeds", "2")
    assert "10 runs, 4 to do" in capsys.readouterr().out and len(ran) == 5
    record = json.loads(Path("out/mamba.json").read_text())
    assert len(record["differences"]) == 4 and not any(x["lr_on_edge"] for x in record["chosen"])


def test_a_rate_on_the_edge_is_widened_and_its_runs_are_shown(tmp_path, monkeypatch):
    """Cells without training, whose validation is better the smaller their rate is."""
    ran = []

    def imitated(groups, out, device, workers):
        for run in (run for group in groups for run in group):
            ran.append((run.cell.lr, run.cell.seed))
            record = record_of([0.5], 0.5) | run.cell.resolved() | {"cell": run.cell.key()}
            record |= {"filters": [], "tests": {}, "seconds": {}}
            record["validation"] = {"accuracy": 1 - run.cell.lr}
            cells._keep(out, run.cell, record, device)

    monkeypatch.setattr(execution, "execute", imitated)
    monkeypatch.setattr(execution, "hours_by_mixer", lambda groups, device: {"mamba": 0.1})
    monkeypatch.setattr(mamba, "save_figure", lambda *_: None)
    how = (execution.Execution(), 2, (1e-2, 3e-2))
    record = mamba.study("smoke", tmp_path, *how)
    every = [(rate, seed) for rate in (1e-2, 3e-2) for seed in (0, 1)]
    trials = [(rate, TUNING_SEED) for rate in (1e-2, 3e-2)]
    assert ran[:2] == [(1e-2, 0)] * 2 and ran[2:18] == every * 4 and ran[18:26] == trials * 4
    assert ran[26:30] == [(3e-3, TUNING_SEED)] * 4 and ran[30:] == [(3e-3, 0), (3e-3, 1)] * 4
    assert {x["seed"] for x in record["lines"]} == {0, 1}  # the one that chose is not shown
    assert {x["rate"] for x in record["lines"]} == {3e-3, 1e-2, 3e-2}
    assert all(x["lr_on_edge"] and x["lr"] == 3e-3 for x in record["chosen"])
    assert "≤ 0.003" in (tmp_path / "mamba.md").read_text()
    # One rate is no choice.
    alone = mamba.study("smoke", tmp_path, execution.Execution(), 2, (1e-2,))
    assert not any(x["lr_on_edge"] or x["tried"] for x in alone["chosen"])
