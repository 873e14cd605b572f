"""Figures: the grids are the paper's, a run restarts where it stopped, all points are shown."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from cat_lm.core.errors import UserError
from cat_lm.mixers import make_mixer
from eval.common.comparison import t_quantile
from eval.common.grids import cells
from eval.common.grids.execution import Execution
from eval.common.grids.summary import differences, summary
from eval.common.grids.tuning import TUNING_SEED, Choice
from eval.recall.grids import contrasts
from eval.recall.grids import figure as grid
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import CONTROL, GRIDS, NEGATIVE, SCALES, TWO_LAYERS, Run, plan


def test_every_figure_has_a_grid_and_every_grid_a_figure():
    assert {figure.grid for figure in FIGURES.values()} == set(GRIDS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FIGURES)
def test_every_cell_of_every_grid_fits(name, scale):
    places = plan(name, SCALES[scale])
    for place in places:
        cell = place.run.cell
        task = cell.make_task()
        make_mixer(cell.mixer)
        for length in cell.test_lengths:
            task.at_length(length)
        assert cell.stop_above is None  # all train for as long
    shown = [place.run for place in places if place.run.row != CONTROL]
    models = [run.cell for run in shown if run.line != NEGATIVE]
    assert len(set(models)) == len(models)
    panels = {(run.row, run.column) for run in shown}
    assert panels == {(run.row, run.column) for run in shown if run.line == NEGATIVE}


@pytest.mark.parametrize("name", FIGURES)
def test_every_row_has_a_control_as_hard_and_as_long_as_what_it_vouches_for(name):
    places = plan(name, SCALES["paper"])
    controls = {p.run.column: p for p in places if p.run.row == CONTROL}
    assert set(controls) == {p.run.row.removesuffix(TWO_LAYERS) for p in places} - {CONTROL}
    for place in (p for p in places if p.run.row != CONTROL):
        control, cell = controls[place.run.row.removesuffix(TWO_LAYERS)], place.run.cell
        alike = {"d_model": 1, "seq_len": 1, "mixer": "", "layers": 1, "task": ""}
        alike |= {"test_lengths": (), "fixed_items": False}
        assert replace(control.run.cell, **alike) == replace(cell, **alike)
        assert control.run.cell.seq_len >= cell.seq_len
        assert control.run.cell.d_model >= cell.d_model
        task, mine = control.run.cell.make_task(), cell.make_task()
        assert type(task) is type(mine) and task.vocabulary == mine.vocabulary
        if hasattr(task, "num_keys"):
            assert (task.num_keys, task.ngram, task.pool) >= (mine.num_keys, mine.ngram, mine.pool)
        if place.run.line != NEGATIVE:
            assert (control.rates, control.seeds) == (place.rates, place.seeds)
        layers = control.run.cell.layers or make_mixer(control.run.line).layers
        assert layers == (1 if control.run.line == "cat:heads=2" else 2)


def test_the_papers_grids():
    accuracy = plan("accuracy", SCALES["paper"])
    cat = [p for p in accuracy if p.run.line == "cat" and p.run.row == "MQAR"]
    lengths = Counter(p.run.cell.seq_len for p in cat)
    assert lengths == dict.fromkeys((64, 128, 256, 512), 3)  # widths
    assert {p.run.cell.make_task().num_keys for p in cat} == {16, 32, 64, 128}
    assert {p.rates for p in cat} == {(1e-3, 1e-2, 1e-1)} and {p.seeds for p in cat} == {3}
    rows = {p.run.row for p in accuracy}
    assert rows == {"MQAR", "MQNAR", "hard MQNAR", CONTROL}
    bigram = [p.run.cell for p in accuracy if "MQNAR" in p.run.row]
    assert {cell.train_examples for cell in bigram} == {200_000}
    keys = {(cell.seq_len, cell.make_task().num_keys) for cell in bigram}
    assert keys == {(64, 10), (128, 20), (256, 40)}  # the paper's, of which one more would fit
    length = [p for p in plan("length", SCALES["paper"]) if p.run.line == "mamba"]
    assert {len(p.rates) for p in length} == {5} and {p.seeds for p in length} == {5}
    assert length[0].run.cell.test_lengths == (32, 64, 128, 256, 512, 1024)
    one_layer = [p.run for p in plan("one-layer", SCALES["paper"]) if p.run.row != CONTROL]
    one_layer = [run for run in one_layer if not run.row.endswith(TWO_LAYERS)]
    assert all((r.cell.layers or make_mixer(r.cell.mixer).layers) == 1 for r in one_layer)
    # What has one layer anyway is the same run in both figures.
    shown = [p.run for p in accuracy if p.run.row != CONTROL]
    of_both = {run.cell for run in shown if run.line in ("cat", "lincat")}
    assert of_both <= {run.cell for run in one_layer}
    assert "attention:position=none" in {p.run.line for p in accuracy}
    with pytest.raises(UserError, match="choose one of"):
        plan("accuracies", SCALES["paper"])


def test_the_figure_of_one_layer_has_the_two_of_the_figure_accuracy():
    for scale in SCALES.values():
        accuracy = {p.run.cell: p for p in plan("accuracy", scale) if p.run.row != CONTROL}
        one_layer = [p for p in plan("one-layer", scale) if p.run.row != CONTROL]
        two = [p for p in one_layer if p.run.row.endswith(TWO_LAYERS)]
        for place in two:
            same = accuracy[place.run.cell]  # the same file in one OUT
            assert (same.rates, same.seeds) == (place.rates, place.seeds)
            assert same.run.row + TWO_LAYERS == place.run.row
            assert place.run.line == NEGATIVE or make_mixer(place.run.line).layers == 2
        of_one = [p for p in one_layer if p not in two and make_mixer(p.run.line).layers == 2]
        places = [(p.run.row + TWO_LAYERS, p.run.column, p.run.line) for p in of_one]
        models = [p for p in two if p.run.line != NEGATIVE]
        assert places == [(p.run.row, p.run.column, p.run.line) for p in models] != []
    one = SCALES["smoke"].with_models(["lincat"])  # has one layer in the paper
    assert not [p for p in plan("one-layer", one) if p.run.row.endswith(TWO_LAYERS)]
    row = plan("one-layer", SCALES["smoke"], ["MQAR"])
    assert {p.run.row for p in row} == {"MQAR", f"MQAR{TWO_LAYERS}", CONTROL}
    assert not [p for p in plan("one-layer-length", SCALES["smoke"]) if "two" in p.run.row]


def test_the_figure_of_widths_has_a_control_at_each_and_time_for_mamba():
    for scale in SCALES.values():
        places = plan("width", scale)
        controls = [p for p in places if p.run.row == CONTROL]
        assert [p.run.cell.d_model for p in controls] == [*scale.memory_widths]
        assert {p.run.across for p in places} == {"width"}
        attention = [p.run.cell for p in places if p.run.line == "attention" and p not in controls]
        assert attention == [p.run.cell for p in controls], "trained once"
        mamba = [p.run.cell for p in places if p.run.line == "mamba"]
        for place, cell in zip(controls, mamba, strict=True):
            alike = replace(cell, mixer="attention", layers=None)
            assert place.run.cell == alike and make_mixer("attention").layers == 2
    cells = [p.run.cell for p in plan("width", SCALES["cpu"])]
    assert {cell.d_model for cell in cells} == {16, 32, 64, 128}
    (mamba,) = {(c.seq_len, c.layers, c.all_steps) for c in cells if c.mixer == "mamba"}
    assert mamba == (32, 1, 4_000)  # after 3,000 it has 0.88 to 0.99 at width 64 (RESULTS.md)
    cells = [p.run.cell for p in plan("width", SCALES["paper"])]
    assert {(c.layers, c.epochs) for c in cells} == {(None, 64)}


def small(name: str):
    """Two mixers, one length and one rate of the smoke grid, at two seeds."""
    scale = replace(SCALES["smoke"], lengths=(16,), examples=128, epochs=1, seeds=2, length_seeds=2)
    scale = replace(scale, rates=(1e-2,), length_rates=(1e-2,))
    places = [p for p in plan(name, scale) if "MQAR" in (p.run.row, p.run.column)]
    places = [p for p in places if p.run.line in ("cat", "attention", NEGATIVE)]
    return [
        replace(p, run=replace(p.run, cell=replace(p.run.cell, test_examples=40))) for p in places
    ]


def of(place):
    return [place.at(place.rates[0], seed) for seed in range(place.seeds)]


@pytest.mark.parametrize("name", ["accuracy", "length"])
def test_a_figure_runs_restarts_and_shows_every_run(name, tmp_path, monkeypatch, capsys):
    places = small(name)
    monkeypatch.setattr(grid, "plan", lambda *_: places)
    runs = list({run.cell: run for place in places for run in of(place)}.values())
    assert len(runs) == 5  # the control is one of the lines
    todo = int(name == "length")  # one once: processes start slowly
    for run in runs[todo:]:
        cells.run(tmp_path, run.cell, "cpu", quiet=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    record = grid.figure(name, "smoke", tmp_path, Execution("cpu", workers=1))
    said = capsys.readouterr().out
    assert f"5 runs, {todo} to do" in said and "hours" in said and "positive control" in said
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert len(list((tmp_path / "cells").iterdir())) == len(runs)
    assert json.loads((tmp_path / f"{name}.json").read_text())["lines"] == record["lines"]
    cat = [line for line in record["lines"] if line["mixer"] == "cat"]
    assert [line["x"] for line in cat] == ([16] if name == "accuracy" else [16, 32])
    for line in cat:
        values = list(line["runs"].values())
        assert list(line["runs"]) == ["0", "1"] and line["mean"] == sum(values) / 2
    page = (tmp_path / f"{name}.md").read_text()
    pictures = re.findall(r"\]\((.*?)\)", page)
    fixed = [f"{name}-fixed.png"] * (name == "length")
    assert pictures == [f"{name}.png", *fixed, f"{name}-filters.png"]
    assert all((tmp_path / picture).stat().st_size > 5000 for picture in pictures)
    # What spoils the comparison comes first.
    assert page.split("\n\n")[1].startswith("> **The positive control of MQAR failed")
    assert all(f"`{x['mixer']}` | {x['x']} | {x['mean']:.4f}" in page for x in cat)
    assert record["provenance"]["command"] in page
    assert "control failed: MQAR" in (tmp_path / f"{name}.svg").read_text()
    assert "> **The" not in said and "The positive control of MQAR failed" in said
    for control in record["controls"]["negative"]:
        assert control["chance"] == 1 / 32 < control["at_most"] < 0.12


def test_more_seeds_than_the_scales(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(grid, "run_tuned", lambda _, places, *__: seen.extend(places))
    assert grid.figure("length", "smoke", tmp_path, Execution(estimate_only=True), 4) is None
    assert {p.seeds for p in seen if p.run.line != NEGATIVE} == {4}


def test_one_row_of_panels_has_its_own_places_and_controls():
    whole, row = plan("length", SCALES["smoke"]), "hard MQNAR"
    kept = [p for p in whole if row in (p.run.row, p.run.column)]
    assert plan("length", SCALES["smoke"], [row]) == kept and {p.run.row for p in kept} == {
        *(row, CONTROL)
    }
    assert plan("length", SCALES["smoke"], ["MQAR", row]) == whole


@pytest.mark.parametrize("name", FIGURES)
def test_other_models_than_the_scales(name, tmp_path, monkeypatch):
    seen, models = [], ("lincat", "cat:conv_type=depthwise")
    monkeypatch.setattr(grid, "run_tuned", lambda _, places, *__: seen.extend(places))
    whole = plan(name, SCALES["smoke"])
    assert grid.figure(name, "smoke", tmp_path, Execution(estimate_only=True), None, models) is None
    lines = [p.run.line for p in seen if p.run.row != CONTROL]
    assert set(lines) == {*models, NEGATIVE}
    assert [p for p in seen if p.run.row == CONTROL] == [p for p in whole if p.run.row == CONTROL]
    # A model's cells are those of the whole figure, so that models can be added one by one.
    assert {p for p in seen if p.run.line in ("lincat", NEGATIVE)} <= set(whole) or name == "width"


def test_the_page_names_the_models_that_were_not_run(tmp_path, monkeypatch):
    places = [p for p in small("accuracy") if p.run.line != "attention" or p.run.row == CONTROL]
    rows = [found(run, run.cell.seed, 0.5) for place in places for run in of(place)]
    for _, record, _ in rows:
        record |= {"filters": [], "delays": []}
    monkeypatch.setattr(grid, "run_tuned", lambda *_: rows)
    records = [record for _, record, _ in rows]
    monkeypatch.setattr(grid, "all_records", lambda *_: records)
    monkeypatch.setattr(grid, "_draw", lambda *_: None)
    later = {"commit": "d" * 40, "date": "2026-11-28T00:00:59+00:00"}
    rows[0][1]["provenance"] = MADE | later
    record = grid.figure("accuracy", "smoke", tmp_path, Execution(), None, ("cat",))
    commits = {"commits": ["c" * 40, "d" * 40], "machines": ["m, cpu"]}
    assert record["trained"] == commits | {"first": MADE["date"], "last": later["date"]}
    assert record["not_run"] == [*SCALES["smoke"].models[1:]]
    page = (tmp_path / "accuracy.md").read_text()
    assert "at smoke scale. Not run: `cat:conv_type=depthwise`, `lincat`, " in page
    told = "between 2026-11-27 14:08 and 2026-11-28 00:00 UTC, at commits ccccccccc, ddddddddd; m"
    assert told in page
    monkeypatch.setattr(grid, "plan", lambda *_: places)
    grid.figure("accuracy", "smoke", tmp_path, Execution())
    assert "Not run" not in (tmp_path / "accuracy.md").read_text()


def test_a_figure_of_a_run_that_diverged_is_json(tmp_path, monkeypatch):
    rows = [found(run, 0, 0.5) for place in small("accuracy") for run in of(place)[:1]]
    for _, record, _ in rows:
        record |= {"filters": [], "delays": []}
    lost = Choice(0.01, {0.01: 0.9, 0.1: math.nan}, True)
    monkeypatch.setattr(grid, "run_tuned", lambda *_: [(*row[:2], lost) for row in rows])
    monkeypatch.setattr(grid, "all_records", lambda *_: [record for _, record, _ in rows])
    of_its_own = next(row for row in rows if row[0].line == "attention" and row[0].row != CONTROL)
    nothing = next(row for row in rows if row[0].line == NEGATIVE)
    for _, record, _ in (of_its_own, nothing):
        record["accuracy"] = record["tests"]["trained length"]["accuracy"] = -math.inf
    told = grid.figure("accuracy", "smoke", tmp_path, Execution())
    assert {(x["mixer"], x["seed"]) for x in told["diverged"]} == {("attention", 0), (NEGATIVE, 0)}
    where = f"`attention` on {of_its_own[0].row}, {of_its_own[0].column} with seed 0"
    assert where in (tmp_path / "accuracy.md").read_text()
    # A control without a number has shown nothing.
    assert [x["passed"] for x in told["controls"]["negative"]].count(False) >= 1
    text = (tmp_path / "accuracy.json").read_text()
    assert "NaN" not in text and json.loads(text)["lines"][0]["tried"] == {"0.01": 0.9, "0.1": None}


CHOICE = Choice(0.01, {0.01: 0.9, 0.1: 0.2}, True)
MADE = {"commit": "c" * 40, "machine": "m", "device": "cpu", "date": "2026-11-27T14:08:48+00:00"}


def found(run: Run, seed: int, accuracy: float, **also: float):
    """A run with one test, as run_tuned gives it."""
    run = replace(run, cell=replace(run.cell, seed=seed))
    test = {"seq_len": run.cell.seq_len, "accuracy": accuracy, "rows_right": 0.0, **also}
    record = {"tests": {"trained length": test}, "accuracy": accuracy, "layers": 2}
    return run, record | {"provenance": MADE}, CHOICE


def test_a_line_is_over_its_seeds_and_says_how_its_rate_was_chosen():
    run = of(small("accuracy")[0])[0]
    rows = [found(run, 0, 0.7, accuracy_shared=0.5), found(run, 2, 0.6, accuracy_shared=0.3)]
    (line,) = summary(rows, grid.tests)
    assert (line["mean"], line["min"], line["max"]) == (pytest.approx(0.65), 0.6, 0.7)
    assert line["runs"] == {"0": 0.7, "2": 0.6}
    assert line["also"] == {"accuracy_shared": pytest.approx(0.4)}
    assert (line["lr"], line["lr_on_edge"]) == (0.01, True)
    assert line["tried"] == {"0.01": 0.9, "0.1": 0.2}


def test_every_place_of_a_figure_has_a_line_of_its_own():
    run = of(small("accuracy")[0])[0]
    other = replace(run, cell=replace(run.cell, seq_len=32))
    runs = [run, replace(run, row="x"), replace(run, column="x"), replace(run, line="x"), other]
    rows = [found(run, 0, number / 8) for number, run in enumerate(runs)]
    lines = summary(rows, grid.tests)
    assert [line["mean"] for line in lines] == [number / 8 for number in range(5)]
    places = [(x["row"], x["column"], x["mixer"], x["x"]) for x in lines]
    assert places == [(r.row, r.column, r.line, r.cell.seq_len) for r in runs]


def test_differences_are_paired_and_corrected_for_their_number():
    run = of(small("accuracy")[0])[0]
    values = {"cat": (0.9, 0.8, 0.85), "mamba": (0.5, 0.38, 0.46), "based": (0.9, 0.79, 0.86)}
    rows = [
        found(replace(run, line=line), seed, accuracy)
        for line, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    rows += [found(replace(run, line=NEGATIVE), 0, 0.1), found(replace(run, row=CONTROL), 0, 1.0)]
    mamba, based = differences(summary(rows, grid.tests))
    assert (mamba["mixer"], mamba["minus"], mamba["x"]) == ("cat", "mamba", 16)
    assert mamba["mean"] == pytest.approx((0.4 + 0.42 + 0.39) / 3)
    # Two comparisons: the quantile of 0.9875 at two degrees of freedom.
    deviation = (
        ((0.4 - 1.21 / 3) ** 2 + (0.42 - 1.21 / 3) ** 2 + (0.39 - 1.21 / 3) ** 2) / 2
    ) ** 0.5
    half = t_quantile(0.9875, 2) * deviation / 3**0.5
    assert mamba["high"] - mamba["mean"] == pytest.approx(half)
    assert (mamba["verdict"], based["verdict"]) == ("higher", "unclear")
    assert mamba["comparisons"] == 2
    assert not differences(summary(rows[::3], grid.tests))  # one seed says nothing


def line(mixer: str, values: tuple[float, ...], x: int = 16, row: str = "MQAR") -> dict:
    """A line of `summary`, as far as it is compared."""
    runs = {str(seed): value for seed, value in enumerate(values)}
    return {"row": row, "column": "d = 8", "mixer": mixer, "x": x, "runs": runs}


def pairs_of(found: list[dict]) -> list[tuple]:
    return [(x["row"], x["column"], x["x"], x["mixer"], x["minus"]) for x in found]


def test_one_layer_is_compared_with_two_of_the_same_model_at_the_same_length():
    two = f"MQAR{TWO_LAYERS}"
    lines = [line("cat", (1.0, 1.0)), line("mamba", (0.5, 0.625)), line("mamba", (0.25, 0.5), 32)]
    lines += [line(NEGATIVE, (0.1,)), line("mamba", (0.75, 1.0), 16, two), line(NEGATIVE, (0.1,))]
    lines += [line("based", (1.0, 1.0), 16, two), line("mamba", (1.0, 1.0), 16, CONTROL)]
    lines[5]["row"] = two
    first, layers = contrasts.told(lines, [], "length")
    place = ("MQAR", "d = 8", 16)
    assert pairs_of([first]) == [(*place, "cat", "mamba")]
    # No two layers at 32, and no one layer of Based: neither is compared.
    assert pairs_of([layers]) == [(*place, "mamba", f"mamba{TWO_LAYERS}")]
    assert layers["mean"] == -0.3125 and layers["comparisons"] == first["comparisons"] == 2
    (alone,) = contrasts.told([x for x in lines if x["row"] != two], [], "length")
    assert alone["comparisons"] == 1 and alone["high"] < first["high"]


def test_the_largest_width_is_compared_with_the_least_of_the_same_model():
    lines = [line(mixer, values, x) for mixer, x, values in (
        *(("cat", 16, (1.0, 0.75)), ("cat", 64, (1.0, 1.0)), ("cat", 32, (0.5, 0.25))),
        *(("mamba", 16, (0.25, 0.375)), ("mamba", 64, (0.75, 1.0)), (NEGATIVE, 16, (0.0, 0.0))),
        *((NEGATIVE, 64, (0.0, 0.0)), ("based", 16, (0.5, 0.5))),
    )]  # fmt: skip
    lines += [
        line("attention", (0.5, 0.5), 16, CONTROL),
        line("attention", (1.0, 1.0), 64, CONTROL),
    ]
    found = contrasts.told(lines, [], "width")
    panels, wide, (gain,) = found[:3], found[3:5], found[5:]
    assert pairs_of(panels) == [
        ("MQAR", "d = 8", x, "cat", minus)
        for x, minus in ((16, "mamba"), (64, "mamba"), (16, "based"))
    ]
    assert pairs_of(wide) == [
        ("MQAR", "d = 8", 64, f"{mixer}, d = 64", f"{mixer}, d = 16") for mixer in ("cat", "mamba")
    ]
    assert [x["mean"] for x in wide] == [0.125, 0.5625]
    assert (gain["mixer"], gain["minus"]) == (
        "mamba, d = 64 less mamba, d = 16",
        "cat, d = 64 less cat, d = 16",
    )
    assert gain["mean"] == 0.5625 - 0.125
    assert {x["comparisons"] for x in found} == {6}
    assert pairs_of(contrasts.told(lines, [], "length")) == pairs_of(panels)  # lengths: none


def test_generated_answers_are_compared_and_counted_too():
    copying = [found(run, seed, 0.5, free_running_accuracy=value) for run, values in (
        (of(small("accuracy")[0])[0], (0.25, 0.5, 0.375)),
        (replace(of(small("accuracy")[0])[0], line="mamba"), (1.0, 0.875, 0.9375)),
        (replace(of(small("accuracy")[0])[0], row=CONTROL, line="mamba"), (1.0, 1.0, 1.0)),
    ) for seed, value in enumerate(values)]  # fmt: skip
    lines, generated = (summary(copying, how) for how in (grid.tests, grid.generated_tests))
    assert generated[0]["runs"] == {"0": 0.25, "1": 0.5, "2": 0.375}
    fed, own = contrasts.told(lines, generated, "length")
    assert (fed["row"], own["row"]) == ("MQAR", "MQAR, generated")
    assert (fed["mean"], own["mean"]) == (0.0, pytest.approx(-0.5625))
    assert fed["comparisons"] == own["comparisons"] == 2
    # A test that fed no answers back has no such line.
    assert not summary([found(of(small("accuracy")[0])[0], 0, 0.5)], grid.generated_tests)


def test_points_are_the_lengths_of_the_tests_or_the_width():
    run = of(small("length")[0])[0]
    tests = {"trained length": (16, 0.9), "length 8": (8, 0.8), "length 32": (32, 0.5)}
    tests["length 32, 4 keys"] = (32, 0.7)
    tests = {name: {"seq_len": x, "accuracy": y} for name, (x, y) in tests.items()}
    tests["length 8"]["one_token_ceiling"] = 0.25
    record = {"accuracy": 0.85, "tests": tests}
    points, fixed = grid.points(), grid.points("accuracy", grid.fixed_tests)
    assert points(run, record) == {8: 0.8, 16: 0.9, 32: 0.5}
    assert fixed(run, record) == {16: 0.9, 32: 0.7}
    assert grid.points("one_token_ceiling")(run, record) == {8: 0.25}
    trained = replace(run, across="length")
    assert points(trained, record) == {16: 0.9} and not fixed(trained, record)
    wide = replace(run, across="width", cell=replace(run.cell, d_model=48))
    assert points(wide, record) == {48: 0.9}
    del tests["length 32, 4 keys"]
    assert not fixed(run, record)


def with_accuracy(trained: float, **tests: float) -> dict:
    """A record of a control that has this accuracy at its length, and these in other tests."""
    found = {"trained length": trained} | {k.replace("_", " "): x for k, x in tests.items()}
    return {
        "accuracy": trained,
        "layers": 2,
        "tests": {name: {"accuracy": accuracy} for name, accuracy in found.items()},
    }


def test_the_negative_control_is_at_chance_in_every_test():
    (place,) = (p for p in small("length") if p.run.line == NEGATIVE)
    (run, *_), (_, longer) = of(place), place.run.cell.test_lengths
    tasks = run.cell.tests()
    names = [name for name, task in tasks.items() if task != tasks["trained length"]]
    assert len(names) < len(tasks) - 1, "one is on the same rows"
    record = with_accuracy(0.03, **dict.fromkeys(list(tasks)[1:], 0.03))
    elsewhere = replace(run, row=f"{run.row}{TWO_LAYERS}")
    found = grid.controls([(run, record), (elsewhere, record)])["negative"]
    assert {x["row"] for x in found} == {run.row}
    assert all(x["passed"] for x in found)
    assert [x["test"] for x in found] == ["trained length", *names] and len(names) > 1
    record["tests"][f"length {longer}"]["accuracy"] = 0.3
    found = grid.controls([(run, record)])["negative"]
    assert [x["test"] for x in found if not x["passed"]] == [f"length {longer}"]


def test_controls_are_measured_against_their_limits():
    places = {p.run.row if p.run.row == CONTROL else p.run.line: p for p in small("accuracy")}
    negative, positive = of(places[NEGATIVE])[0], of(places[CONTROL])
    assert (positive[0].column, positive[0].line, len(positive)) == ("MQAR", "attention", 2)
    low = with_accuracy(0.3)
    found = grid.controls([(run, low) for run in (negative, *positive)])
    assert [x["passed"] for x in (*found["positive"], *found["negative"])] == [False, False]
    # 40 rows of 4 answers: five deviations of a guesser with chance 1/32.
    assert found["negative"][0]["at_most"] == pytest.approx(1 / 32 + 5 * (31 / 32**2 / 160) ** 0.5)
    high = [with_accuracy(accuracy) for accuracy in (0.03, 0.983, 0.999)]
    found = grid.controls(list(zip((negative, *positive), high, strict=True)))
    (one,) = found["positive"]
    assert one["passed"] and one["accuracy"] == pytest.approx(0.991) and one["min"] == 0.983
    assert found["negative"][0]["passed"]
    # Across widths each has its own, and one that learned vouches for no other.
    wide = [replace(run, cell=replace(run.cell, d_model=64)) for run in positive]
    rows = [(run, with_accuracy(0.5)) for run in positive]
    both = grid.controls([*rows, *((run, with_accuracy(1.0)) for run in wide)])
    assert [(x["d_model"], x["passed"]) for x in both["positive"]] == [(16, False), (64, True)]
    # Every place has its own; a guesser's luck is at most all answers.
    shorter = {"test_examples": 1, "test_lengths": (), "fixed_items": False}
    cell = replace(negative.cell, task="mqar:keys=2,vocab_size=8", **shorter)
    runs = [negative, replace(negative, row="MQNAR", column="d = 9", cell=cell), *positive]
    found = grid.controls([(run, with_accuracy(0.1)) for run in runs])
    places = [(x["row"], x["column"], x["seq_len"], x["passed"]) for x in found["negative"]]
    assert places == [("MQAR", "d = 16", 16, True), ("MQNAR", "d = 9", 16, True)]
    assert [x["chance"] for x in found["negative"]] == [1 / 32, 1 / 4]
    assert found["negative"][1]["at_most"] == 1.0
    assert TUNING_SEED not in (run.cell.seed for run in runs)
