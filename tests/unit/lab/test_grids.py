"""The grids of studies: the papers' models, tasks and controls at every scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from cat_lm.mixers import make_mixer
from eval.lab.contrasts import compute, difference_of, ratio_error
from eval.lab.frame import gather_lines
from eval.lab.grid import LADDER, Choice
from eval.lab.places import CONTROL, NEGATIVE, TUNING_SEED
from eval.lab.study import Asked
from eval.long_range.grids import steps_to
from eval.recall import grids
from eval.recall.grids import SCALES, TWO_LAYERS
from eval.studies import STUDIES, mamba, streams

RECALL = ("accuracy", "length", "one-layer", "one-layer-length", "width", "selective-copy")
LONG_RANGE = ("lra", "ablation", "context", "data-size", "atomic", "smnist")


def plan(name: str, scale: str, **asked):
    return STUDIES.get(name).places(Asked(scale, **asked))


def shown(places):
    return [place.run for place in places if place.run.row != CONTROL]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECALL)
def test_every_run_of_recall_fits_and_has_its_negative_control(name, scale):
    places = plan(name, scale)
    for place in places:
        cell = place.run.cell
        for length in cell.test_lengths:
            cell.make_task().at_length(length)
        assert cell.stop_above is None  # all train for as long
        assert set(place.rates) <= set(LADDER) and list(place.rates) == sorted(place.rates)
        assert place.seeds < TUNING_SEED
    runs = shown(places)
    models = [run.cell for run in runs if run.line != NEGATIVE]
    assert len(set(models)) == len(models)
    panels = {(run.row, run.column) for run in runs}
    assert panels == {(run.row, run.column) for run in runs if run.line == NEGATIVE}


@pytest.mark.parametrize("name", RECALL)
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
        assert control.run.cell.d_model >= cell.d_model
        task, mine = control.run.cell.make_task(), cell.make_task()
        assert type(task) is type(mine) and task.vocabulary == mine.vocabulary
        if hasattr(task, "num_keys"):
            assert (task.num_keys, task.ngram, task.pool) >= (mine.num_keys, mine.ngram, mine.pool)
        if place.run.line != NEGATIVE:
            assert (control.rates, control.seeds) == (place.rates, place.seeds)


def test_accuracy_has_the_papers_grid():
    accuracy = plan("accuracy", "paper")
    cat = [p for p in accuracy if p.run.line == "cat" and p.run.row == "MQAR"]
    lengths = Counter(p.run.cell.seq_len for p in cat)
    assert lengths == dict.fromkeys((64, 128, 256, 512), 3)  # widths
    assert {p.run.cell.make_task().num_keys for p in cat} == {16, 32, 64, 128}
    assert {p.rates for p in cat} == {(1e-3, 1e-2, 1e-1)} and {p.seeds for p in cat} == {3}
    assert {p.run.row for p in accuracy} == {"MQAR", "MQNAR", "hard MQNAR", CONTROL}
    bigram = [p.run.cell for p in accuracy if "MQNAR" in p.run.row]
    assert {cell.train_examples for cell in bigram} == {200_000}
    keys = {(cell.seq_len, cell.make_task().num_keys) for cell in bigram}
    assert keys == {(64, 10), (128, 20), (256, 40)}  # the paper's, of which one more would fit
    length = [p for p in plan("length", "paper") if p.run.line == "mamba"]
    assert {len(p.rates) for p in length} == {5} and {p.seeds for p in length} == {5}
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


@pytest.mark.parametrize("scale", SCALES)
def test_widths_have_a_control_each_and_time_for_mamba(scale):
    places = plan("width", scale)
    controls = [p for p in places if p.run.row == CONTROL]
    assert [p.run.cell.d_model for p in controls] == [*SCALES[scale].memory_widths]
    attention = [p.run.cell for p in places if p.run.line == "attention" and p not in controls]
    assert attention == [p.run.cell for p in controls], "trained once"
    if scale == "cpu":
        (found,) = {(r.cell.layers, r.cell.all_steps) for r in shown(places) if r.line == "mamba"}
        assert found == (1, 4_000)


def test_rows_models_and_seeds_are_chosen_by_their_names():
    whole, row = plan("length", "smoke"), "hard MQNAR"
    kept = [p for p in whole if row in (p.run.row, p.run.column)]
    assert plan("length", "smoke", rows=(row,)) == kept
    assert {p.seeds for p in plan("length", "smoke", seeds=4) if p.run.line != NEGATIVE} == {4}
    for name in RECALL:
        models = ("lincat", "cat:conv_type=depthwise")
        found = plan(name, "smoke", models=models)
        assert {run.line for run in shown(found)} == {*models, NEGATIVE}
        assert [p for p in found if p.run.row == CONTROL] == [
            p for p in plan(name, "smoke") if p.run.row == CONTROL
        ]
    for wrong, words in (
        ({"rows": ("x",)}, r"--rows 'x': choose among MQAR"),
        ({"models": ("ct",)}, "ct"),
        ({"models": (NEGATIVE,)}, "is in every figure"),
        ({"models": ("cat", "cat")}, "is given twice"),
    ):
        with pytest.raises(UserError, match=words):
            plan("length", "smoke", **wrong)


def test_values_are_by_length_or_width():
    run = shown(plan("length", "smoke"))[0]
    tests = {"trained length": (16, 0.9), "length 8": (8, 0.8), "length 32": (32, 0.5)}
    tests["length 32, 4 keys"] = (32, 0.7)
    tests = {name: {"seq_len": x, "accuracy": y} for name, (x, y) in tests.items()}
    tests["length 8"]["one_token_ceiling"] = 0.25
    record = {"accuracy": 0.9, "tests": tests}
    assert grids.values(run, record) == {
        8: {"value": 0.8, "one_token_ceiling": 0.25},
        16: {"value": 0.9, "fixed_keys": 0.9},
        32: {"value": 0.5, "fixed_keys": 0.7},
    }
    assert grids.values(replace(run, across="length"), record) == {16: {"value": 0.9}}
    wide = replace(run, across="width", cell=replace(run.cell, d_model=48))
    assert grids.values(wide, record) == {48: {"value": 0.9}}


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
    lines = [line(mixer, values, x) for mixer, x, values in (
        *(("cat", 16, (1.0, 0.75)), ("cat", 64, (1.0, 1.0)), ("cat", 32, (0.5, 0.25))),
        *(("mamba", 16, (0.25, 0.375)), ("mamba", 64, (0.75, 1.0)), (NEGATIVE, 16, (0.0, 0.0))),
        ("based", 16, (0.5, 0.5)),
    )]  # fmt: skip
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


def test_streams_compare_like_with_like(tiny_corpus, monkeypatch):
    small = dataclasses.replace(streams.SCALES["smoke"], documents=4, choosing=2)
    monkeypatch.setitem(streams.SCALES, "smoke", small)
    places = streams.places(Asked("smoke", more={"data": (str(tiny_corpus),)}))
    assert len({(p.run.row, p.run.column, p.run.line) for p in places}) == 2 * 8 * (8 + 2 + 5 + 2)
    for place in places:
        run, options = place.run, make_mixer(place.run.cell.mixer).options
        assert (options.heads, options.activation) == (2, "none")
        assert getattr(options, "dropout", 0.0) == 0.0 and not getattr(options, "bias", False)
        assert getattr(options, "position", "none") == "none"
        assert getattr(options, "expand_v", 1.0) == 1.0
        assert options.shared_kv == run.line.startswith("K = V")
        subset = run.line.removeprefix("K = V, ").removesuffix(", W = 2")
        assert (options.streams or "no filters") == subset
        assert run.cell.layers == 1 or run.row != streams.RECALL
        if subset != "no filters":
            assert options.init == "identity"
            assert options.window == (2 if run.line.endswith("W = 2") else 4)
            assert run.column.endswith(f", {options.conv_type}")
    columns = ("DeltaNet, head", "softmax attention, head")
    found = streams.places(Asked("smoke", columns=columns, rows=(streams.RECALL,)))
    assert [*dict.fromkeys(p.run.column for p in found)] == [*reversed(columns)]


def test_streams_refuse_data_that_do_not_fit(tiny_corpus, monkeypatch):
    there = open_corpus(tiny_corpus, "validation").num_documents
    for choosing, words in ((3, "are to be scored and 3 others choose rates"), (2, None)):
        scale = dataclasses.replace(streams.SCALES["smoke"], documents=there - 2, choosing=choosing)
        monkeypatch.setitem(streams.SCALES, "smoke", scale)
        asked = Asked("smoke", more={"data": (str(tiny_corpus),)})
        if words is None:
            streams.places(asked)
            continue
        with pytest.raises(UserError, match=words):
            streams.places(asked)
    with pytest.raises(UserError, match="there is another folder of this name"):
        streams.places(Asked("smoke", more={"data": (str(tiny_corpus), str(tiny_corpus))}))
    with pytest.raises(UserError, match=r"^--rows 'text: b': choose among MQAR"):
        streams.places(Asked("smoke", rows=("text: b",)))


def test_streams_contrasts_are_within_a_row_and_of_both_mixers():
    rows = itertools.product(("MQAR", "text: a"), ("softmax attention", "linear attention"))
    lines = [
        {**line(each.name, (0.5, 0.25), row=row), "column": f"{mixer}, head"}
        for row, mixer in rows
        for each in streams.LINES
    ]
    found = compute(streams.contrasts(lines), by_row=True)
    filtered = sum(each.streams != "none" for each in streams.LINES)
    of_row = 2 * (filtered + len(streams.PAIRS)) + len(streams.GAINS)
    assert len(found) == 2 * of_row and {x["comparisons"] for x in found} == {of_row}


def test_mamba_has_every_dropout_and_initialization():
    for name, scale in mamba.SCALES.items():
        runs = [place.run for place in mamba.places(Asked(name))]
        models = [run for run in runs if run.row != CONTROL]
        assert len(models) == 4 * len(scale.lengths)
        for run in models:
            start = run.cell.resolved()["mixer"]["options"]["init"]
            assert run.line == f"dropout {run.cell.embedding_dropout:g}, start {start}"
        assert {run.line for run in runs if run.row == CONTROL} == {"attention", NEGATIVE}


def test_mamba_is_compared_by_when_it_finds_the_task():
    run = shown(mamba.places(Asked("smoke")))[0]
    record = {"history": [{"step": 4, "accuracy": 0.9}, {"step": 8, "accuracy": 0.95}]}
    record["accuracy"] = 0.97
    assert mamba.values(run, record) == {8: {"value": 3.0, "accuracy": 0.97}}
    never = {"history": [{"step": 4, "accuracy": 0.5}], "accuracy": 0.5}
    assert mamba.values(run, never)[8]["value"] == math.inf
    record["validation"] = never["validation"] = {"accuracy": 0.5}
    assert run.cell.score(record) == -3.0 > run.cell.score(never)
    choice = Choice(1e-2, {}, False)
    of = [(replace(r, cell=replace(r.cell, seed=s)), x, choice) for r in shown(
        mamba.places(Asked("smoke"))) for s, x in ((0, record), (1, never))]  # fmt: skip
    found = compute(mamba.contrasts(gather_lines(of, mamba.values)))
    assert len(found) == 4 and {x["low"] for x in found} == {None}  # a run that never found it
    control = [(r, never) for p in mamba.places(Asked("smoke")) if (r := p.run).row == CONTROL]
    assert [one.passed for one in mamba.controls(control)] == [False, True]


@pytest.mark.parametrize("name", LONG_RANGE)
def test_every_run_of_long_range_tasks_fits(name):
    for place in plan(name, "smoke"):
        cell = place.run.cell
        cell.make_task()
        cell.make_mixer()
    chunks = {run.line for run in shown(plan("ablation", "smoke"))}
    assert {"vanilla:chunk=8", "alibi:chunk=8", "las:position=none,chunk=8"} <= chunks


def test_steps_are_counted_to_the_level():
    history = [{"step": 2, "value": 0.4}, {"step": 4, "value": 0.6}, {"step": 6, "value": 0.5}]
    assert steps_to({"history": history}, 0.5) == 4
    assert steps_to({"history": history}, 0.7) is None is steps_to({"history": history}, None)


def test_documents_of_both_sides_make_the_error_of_a_contrast():
    tokens, nats = [4, 6, 5], {"a": [8.0, 9.0, 10.0], "b": [6.0, 10.0, 9.0]}
    lines = [
        {**line(name, (1.8, 1.7)), "documents": {"tokens": tokens, "nats": {"0": x, "1": x}}}
        for name, x in nats.items()
    ]
    (found,) = compute([difference_of(*lines)])
    differences = [a - b for a, b in zip(nats["a"], nats["b"], strict=True)]
    assert found["document_error"] == pytest.approx(ratio_error(differences, tokens))
    assert found["documents"] == 3
    del lines[1]["documents"]
    assert compute([difference_of(*lines)])[0]["document_error"] is None
