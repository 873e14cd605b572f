"""The studies of recall: the papers' grids, what is compared, and their controls."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from cat_lm.mixers import make_mixer
from eval.lab.contrasts import compute
from eval.lab.places import CONTROL, NEGATIVE
from eval.lab.study import StudyOptions
from eval.long_range.grids import steps_to
from eval.recall import grids
from eval.recall.grids import SCALES, TWO_LAYERS
from eval.studies import STUDIES

NAMES = ("accuracy", "length", "one-layer", "one-layer-length", "width", "selective-copy")


def plan(name: str, scale: str, **asked):
    return STUDIES.get(name).places(StudyOptions(scale, **asked))


def shown(places):
    return [place.run for place in places if place.run.row != CONTROL]


@pytest.mark.parametrize("name", NAMES)
def test_positive_control_is_as_hard_as_what_it_vouches_for(name):
    places = plan(name, "paper")
    controls = {p.run.column: p for p in places if p.run.row == CONTROL}
    assert set(controls) == {p.run.row.removesuffix(TWO_LAYERS) for p in places} - {CONTROL}
    for place in (p for p in places if p.run.row != CONTROL):
        control, cell = controls[place.run.row.removesuffix(TWO_LAYERS)], place.run.cell
        alike = {"d_model": 1, "seq_len": 1, "mixer": "", "layers": 1, "task": ""}
        alike |= {"test_lengths": (), "fixed_items": False}
        assert replace(control.run.cell, **alike) == replace(cell, **alike)
        assert control.run.cell.seq_len >= cell.seq_len
        assert control.run.cell.d_model >= cell.d_model and cell.stop_above is None
        task, mine = control.run.cell.make_task(), cell.make_task()
        assert type(task) is type(mine) and task.vocabulary == mine.vocabulary
        if hasattr(task, "num_keys"):
            assert (task.num_keys, task.ngram, task.pool) >= (mine.num_keys, mine.ngram, mine.pool)
        if place.run.line != NEGATIVE:
            assert (control.rates, control.seeds) == (place.rates, place.seeds)


def test_accuracy_and_length_have_the_papers_grids():
    accuracy = plan("accuracy", "paper")
    cat = [p for p in accuracy if p.run.line == "cat" and p.run.row == "MQAR"]
    lengths = Counter(p.run.cell.seq_len for p in cat)
    assert lengths == dict.fromkeys((64, 128, 256, 512), 3)  # widths
    assert {p.run.cell.make_task().num_keys for p in cat} == {16, 32, 64, 128}
    assert {(p.rates, p.seeds) for p in cat} == {((1e-3, 1e-2, 1e-1), 3)}
    assert {p.run.row for p in accuracy} == {"MQAR", "MQNAR", "hard MQNAR", CONTROL}
    bigram = [p.run.cell for p in accuracy if "MQNAR" in p.run.row]
    assert {cell.train_examples for cell in bigram} == {200_000}
    keys = {(cell.seq_len, cell.make_task().num_keys) for cell in bigram}
    assert keys == {(64, 10), (128, 20), (256, 40)}  # the paper's, of which one more would fit
    length = [p for p in plan("length", "paper") if p.run.line == "mamba"]
    assert {(len(p.rates), p.seeds) for p in length} == {(5, 5)}
    assert length[0].run.cell.test_lengths == (32, 64, 128, 256, 512, 1024)


@pytest.mark.parametrize("scale", SCALES)
def test_one_layer_is_trained_with_the_two_of_accuracy(scale):
    accuracy = {p.run.cell: p for p in plan("accuracy", scale) if p.run.row != CONTROL}
    one_layer = [p for p in plan("one-layer", scale) if p.run.row != CONTROL]
    two = [p for p in one_layer if p.run.row.endswith(TWO_LAYERS)]
    for place in two:
        same = accuracy[place.run.cell]  # the same file in one OUT
        assert (same.rates, same.seeds) == (place.rates, place.seeds)
        assert same.run.row + TWO_LAYERS == place.run.row
    for run in (p.run for p in one_layer if p not in two):
        assert (run.cell.layers or make_mixer(run.cell.mixer).layers) == 1
    assert {p.run.line for p in two if p.run.line != NEGATIVE} == {
        p.run.line for p in one_layer if p not in two and make_mixer(p.run.line).layers == 2
    }


def test_every_width_has_its_control():
    places = plan("width", "paper")
    controls = [p.run.cell for p in places if p.run.row == CONTROL]
    assert [cell.d_model for cell in controls] == [*SCALES["paper"].memory_widths]
    assert [r.cell for r in shown(places) if r.line == "attention"] == controls, "trained once"


@pytest.mark.parametrize("name", NAMES)
def test_rows_models_and_seeds_are_chosen_by_their_names(name):
    models = ("lincat", "cat:conv_type=depthwise")
    whole, found = plan(name, "smoke"), plan(name, "smoke", models=models, seeds=4)
    assert {run.line for run in shown(found)} == {*models, NEGATIVE}
    assert {p.seeds for p in found if p.run.row != CONTROL and p.run.line != NEGATIVE} == {4}
    row = shown(whole)[-1].row
    kept = [p for p in whole if row.removesuffix(TWO_LAYERS) in (p.run.row, p.run.column)]
    assert set(kept) <= set(plan(name, "smoke", rows=(row.removesuffix(TWO_LAYERS),)))


def test_values_are_by_length_or_width():
    run = shown(plan("length", "smoke"))[0]
    tests = {"trained length": (16, 0.9), "length 8": (8, 0.8), "length 32": (32, 0.5)}
    tests["length 32, 4 keys"] = (32, 0.7)
    tests = {name: {"seq_len": x, "accuracy": y} for name, (x, y) in tests.items()}
    tests["length 8"]["one_token_ceiling"] = 0.25
    record = {"accuracy": 0.9, "tests": tests}
    assert grids.measured_values(run, record) == {
        8: {"value": 0.8, "one_token_ceiling": 0.25},
        16: {"value": 0.9, "fixed_keys": 0.9},
        32: {"value": 0.5, "fixed_keys": 0.7},
    }
    assert grids.measured_values(replace(run, across="length"), record) == {16: {"value": 0.9}}
    wide = replace(run, across="width", cell=replace(run.cell, d_model=48))
    assert grids.measured_values(wide, record) == {48: {"value": 0.9}}


def with_accuracy(trained: float, **tests: float) -> dict:
    """A record of a control that has this accuracy at its length, and these in other tests."""
    found = {"trained length": trained} | {k.replace("_", " "): x for k, x in tests.items()}
    named = {name: {"accuracy": accuracy} for name, accuracy in found.items()}
    return {"accuracy": trained, "layers": 2, "tests": named}


def test_negative_control_is_at_chance_in_every_test():
    (run,) = (r for r in shown(plan("length", "smoke", rows=("MQAR",))) if r.line == NEGATIVE)
    run = replace(run, cell=replace(run.cell, test_examples=40))
    tasks = run.cell.tests()
    record = with_accuracy(0.03, **dict.fromkeys(list(tasks)[1:], 0.03))
    elsewhere = replace(run, row=f"{run.row}{TWO_LAYERS}")
    (found,) = grids.controls([(run, record), (elsewhere, record)])
    assert (found.row, found.kind, found.passed) == (run.row, "negative", True)
    # 40 rows of 4 answers: five deviations of a guesser with chance 1/32.
    alone = replace(run, cell=replace(run.cell, test_lengths=(), fixed_items=False))
    (of_one,) = grids.controls([(alone, with_accuracy(0.03))])
    assert of_one.bound == pytest.approx(1 / 32 + 5 * (31 / 32**2 / 160) ** 0.5)
    record["tests"][f"length {run.cell.test_lengths[-1]}"]["accuracy"] = 0.3
    (found,) = grids.controls([(run, record)])
    assert not found.passed and f"length {run.cell.test_lengths[-1]}" in found.what
    record["tests"]["trained length"]["accuracy"] = -math.inf  # diverged: it has shown nothing
    assert not grids.controls([(run, record)])[0].passed


def test_positive_control_is_a_mean_over_seeds_at_each_width():
    (place,) = (p for p in plan("accuracy", "smoke", rows=("MQAR",)) if p.run.row == CONTROL)
    runs = [replace(place, seeds=2).at(1e-2, seed) for seed in (0, 1)]
    high = [(run, with_accuracy(x)) for run, x in zip(runs, (0.983, 0.999), strict=True)]
    (found,) = grids.controls(high)
    assert found.value == pytest.approx(0.991) and found.passed and found.line == "attention"
    wide = [(replace(r, cell=replace(r.cell, d_model=64)), with_accuracy(0.5)) for r in runs]
    assert [control.passed for control in grids.controls([*high, *wide])] == [True, False]


def line(mixer: str, values: tuple[float, ...], x: int = 16, row: str = "MQAR", **also) -> dict:
    """A line, as far as it is compared."""
    runs = {str(seed): value for seed, value in enumerate(values)}
    return {"row": row, "column": "d = 8", "line": mixer, "x": x, "runs": runs, "also": also}


def test_one_layer_is_compared_with_two_of_the_same_model_at_the_same_length():
    two = f"MQAR{TWO_LAYERS}"
    lines = [line("cat", (1.0, 1.0)), line("mamba", (0.5, 0.625)), line("mamba", (0.25, 0.5), 32)]
    lines += [line(NEGATIVE, (0.1,)), line("mamba", (0.75, 1.0), 16, two)]
    lines += [line("based", (1.0, 1.0), 16, two)]
    first, layers = compute(grids.contrasts(lines))
    assert (first["contrast"], first["x"]) == ("cat - mamba", 16)
    # No two layers at 32, and no one layer of Based: neither is compared.
    assert (layers["contrast"], layers["x"]) == (f"mamba - mamba{TWO_LAYERS}", 16)
    assert layers["mean"] == -0.3125 and layers["comparisons"] == first["comparisons"] == 2


def test_largest_width_is_compared_with_the_least_and_gains_with_the_first_models():
    lines = [line("cat", (1.0, 0.75)), line("cat", (1.0, 1.0), 64), line("cat", (0.5, 0.25), 32)]
    lines += [line("mamba", (0.25, 0.375)), line("mamba", (0.75, 1.0), 64)]
    lines += [line(NEGATIVE, (0.0, 0.0)), line("based", (0.5, 0.5))]
    found = {x["contrast"]: x for x in compute(grids.width_contrasts(lines))}
    assert len(found) == 5  # cat - mamba stands at two widths
    assert found["cat, d = 64 - cat, d = 16"]["mean"] == 0.125
    assert found["mamba, d = 64 - mamba, d = 16"]["mean"] == 0.5625
    assert found["gain of mamba - gain of cat"]["mean"] == 0.5625 - 0.125
    assert {x["comparisons"] for x in found.values()} == {6}


def test_generated_answers_are_compared_too():
    own = ({"0": 0.25, "1": 0.5}, {"0": 1.0, "1": 0.875})
    lines = [
        line(name, (0.5, 0.5), free_running_accuracy=runs)
        for name, runs in zip(("cat", "mamba"), own, strict=True)
    ]
    fed, generated = compute(grids.contrasts(lines))
    assert fed["mean"] == 0.0 and generated["mean"] == pytest.approx(-0.5625)
    assert generated["row"] == "MQAR, its own answers fed back"


def test_steps_are_counted_to_the_level():
    history = [{"step": 2, "value": 0.4}, {"step": 4, "value": 0.6}, {"step": 6, "value": 0.5}]
    assert steps_to({"history": history}, 0.5) == 4
    assert steps_to({"history": history}, 0.7) is None is steps_to({"history": history}, None)
