"""Figures: the grids are the paper's, a run restarts where it stopped, all points are shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from cat_lm.errors import UserError
from eval.recall import cells, grid, page, pictures, portraits
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
    (control,) = record["controls"]["negative"]
    assert control["chance"] == 1 / 32 < control["at_most"] < 0.12


def test_the_best_rate_is_by_mean_and_its_edge_is_told():
    run = small("accuracy")[0]

    def row(lr: float, seed: int, accuracy: float):
        cell = replace(run.cell, lr=lr, seed=seed)
        return replace(run, cell=cell), {"best_accuracy": accuracy}

    rows = [row(0.1, 0, 0.9), row(0.1, 1, 0.1), row(0.2, 0, 0.7), row(0.2, 1, 0.6), row(0.3, 0, 0)]
    (line,) = grid.summary(rows, grid.points)
    assert line["best_lr"] == 0.2 and not line["best_lr_on_grid_edge"]
    assert (line["min"], line["max"], line["best_of_all"]) == (0.6, 0.7, 0.9)
    assert grid.summary(rows[:4], grid.points)[0]["best_lr_on_grid_edge"]


def control(passed: bool, accuracy: float = 0.5) -> dict:
    places = {"row": "MQAR", "column": "d = 8", "seq_len": 16, "accuracy": accuracy}
    negative = {**places, "chance": 0.1, "at_most": 0.2, "passed": passed}
    return {
        "positive": {"accuracy": accuracy, "at_least": 0.99, "passed": passed},
        "negative": [negative],
    }


def test_failed_controls_are_told():
    positive, negative = page.warnings({"controls": control(False)})
    assert "0.500" in positive and "under-trained" in positive
    assert "length 16" in negative and "0.2000" in negative
    assert not page.warnings({"controls": control(True)})


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


def test_a_page_says_who_solves_the_task_and_where_the_others_end():
    def line(mixer: str, length: int, best: float, rate: float = 0.01) -> dict:
        values = {"mean": best, "min": best, "max": best, "best_of_all": best}
        place = {"row": "MQAR", "column": "d = 8", "mixer": mixer, "seq_len": length}
        runs = {"0.01": [best], "0.1": [best]}
        return {**place, **values, "best_lr": rate, "best_lr_on_grid_edge": True, "runs": runs}

    lines = [line("cat", 16, 0.995), line("cat", 32, 0.991), line("mamba", 16, 1.0)]
    lines += [line("mamba", 32, 0.25, 0.1), line(NEGATIVE, 16, 0.01), line(NEGATIVE, 32, 0.01)]
    record = {"figure": "accuracy", "shows": "x", "scale": "cpu", "lines": lines}
    record |= {"number in the paper (AAAI / workshop / arXiv)": "5 / 3 / 5", "fixed_items": []}
    record |= {"controls": control(True, 0.1), "filters": [], "provenance": {"command": "run it"}}
    text = page.markdown(record)
    assert (
        "d = 8: 0.99 or more at every length: cat; least of the others: mamba 0.250 (length 32)."
        in text
    )
    assert "In 6 of 6 rows" in text and "| ≤ 0.01 |" in text and "| ≥ 0.1 |" in text
    assert "filters" not in text and "under-trained" not in text


def test_lines_are_told_apart():
    names = [f"mixer{i}" for i in range(12)]
    looks = [pictures._style(i, name) for i, name in enumerate(names)]
    looks.append(pictures._style(12, NEGATIVE))
    keys = ("color", "linestyle", "marker", "markerfacecolor")
    assert len({tuple(look.get(key) for key in keys) for look in looks}) == 13
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 13


def test_delays_of_heads_and_their_rule():
    def one_hot(lag: int, size: float = 1.0) -> list[float]:
        return [size * (i == lag) + 0.05 for i in range(4)]

    layer = {
        "q": [one_hot(0), one_hot(1), one_hot(0)],
        "k": [one_hot(2, -2.0), one_hot(1), [1.0, 1.0, 1.0, 1.0]],
        "v": [one_hot(1), one_hot(0), one_hot(0)],
    }
    first, second, third = portraits.heads([layer])
    assert first["delays"] == {"q": 0, "k": 2, "v": 1} and first["key_is_one_more"] is True
    assert second["key_is_one_more"] is False
    assert third["key_is_one_more"] is None and third["single"] == 0.25
    # A stream without a filter has no delay.
    (alone,) = portraits.heads([{"k": [one_hot(1)]}])
    assert alone["delays"] == {"k": 1} and alone["key_is_one_more"] is True
    assert not list(portraits.heads([]))


def test_the_best_run_of_each_place_is_shown_by_its_last_accuracy():
    run = small("accuracy")[0]
    filters = [{"k": [[0.0, 1.0]]}]
    rows = [
        (replace(run, cell=replace(run.cell, seed=seed)), {"accuracy": a, "filters": f})
        for seed, (a, f) in enumerate([(0.5, filters), (0.9, filters), (0.7, filters)])
    ]
    (entry,) = portraits.table(rows)
    assert entry["seed"] == 1 and entry["heads"][0]["delays"] == {"k": 1}
    assert not portraits.table([(run, {"accuracy": 1.0, "filters": []})])
    drawing = portraits.draw([entry] * 70, "many")
    assert "the first 60 of 70 heads" in drawing.get_suptitle()
    assert len(drawing.axes[0].get_yticklabels()) == 60
