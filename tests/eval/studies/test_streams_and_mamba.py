"""The studies streams and mamba: which models they have, and what they compare."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from cat_lm.mixers import make_mixer
from eval.lab.contrasts import compute
from eval.lab.frame import gather_lines
from eval.lab.grid import Choice
from eval.lab.places import CONTROL
from eval.lab.study import StudyOptions
from eval.studies import mamba, streams


def asked(*data, **more) -> StudyOptions:
    return StudyOptions("smoke", more={"data": tuple(map(str, data))}, **more)


def choose(monkeypatch, **documents: int) -> None:
    scale = streams.SCALES["smoke"]
    small = scale._replace(text=scale.text | documents)
    monkeypatch.setitem(streams.SCALES, "smoke", small)


def test_streams_differ_in_what_they_name_alone(tiny_corpus, monkeypatch):
    choose(monkeypatch, documents=4, choosing_documents=2)
    places = streams.plan_places(asked(tiny_corpus))
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
    found = streams.plan_places(StudyOptions("smoke", columns=columns, rows=(streams.RECALL,)))
    assert [*dict.fromkeys(p.run.column for p in found)] == [*reversed(columns)]


def test_streams_refuse_data_that_do_not_fit(tiny_corpus, monkeypatch):
    there = open_corpus(tiny_corpus, "validation").num_documents
    choose(monkeypatch, documents=there - 2, choosing_documents=2)
    streams.plan_places(asked(tiny_corpus))
    with pytest.raises(UserError, match="there is another folder of this name"):
        streams.plan_places(asked(tiny_corpus, tiny_corpus))
    choose(monkeypatch, documents=there - 2, choosing_documents=3)
    with pytest.raises(UserError, match="are to be scored and 3 others choose rates"):
        streams.plan_places(asked(tiny_corpus))


def test_streams_are_compared_with_the_same_without_filters_and_both_mixers():
    rows = itertools.product(("MQAR", "text: a"), ("softmax attention", "linear attention"))
    lines = [
        {"row": row, "column": f"{mixer}, head", "line": each.name, "x": 16}
        | {"runs": {"0": 0.5, "1": 0.25}, "also": {}}
        for row, mixer in rows
        for each in streams.LINES
    ]
    found = streams.contrasts(lines)
    names = {one.name for one in found}
    assert {"k - no filters", "K = V, k - K = V, no filters", "k - q", "k, W = 2 - k"} <= names
    filtered = sum(each.streams != "none" for each in streams.LINES)
    of_row = 2 * (filtered + len(streams.PAIRS)) + len(streams.GAINS)
    assert {x["comparisons"] for x in compute(found, by_row=True)} == {of_row}
    assert len(found) == 2 * of_row


def test_mamba_has_every_dropout_and_initialization():
    runs = [
        place.run for place in mamba.plan_places(StudyOptions("paper")) if place.run.row != CONTROL
    ]
    assert len(runs) == 4 * len(mamba.SCALES["paper"].lengths)
    for run in runs:
        start = run.cell.resolved()["mixer"]["options"]["init"]
        assert run.line == f"dropout {run.cell.embedding_dropout:g}, start {start}"


def test_mamba_is_compared_by_when_it_finds_the_task():
    runs = [place.run for place in mamba.plan_places(StudyOptions("smoke"))]
    shown, control = ([r for r in runs if (r.row == CONTROL) == is_c] for is_c in (False, True))
    record = {"history": [{"step": 4, "accuracy": 0.9}, {"step": 8, "accuracy": 0.95}]}
    record["accuracy"] = 0.97
    assert mamba.measured_values(shown[0], record) == {8: {"value": 3.0, "accuracy": 0.97}}
    never = {"history": [{"step": 4, "accuracy": 0.5}], "accuracy": 0.5}
    assert mamba.measured_values(shown[0], never)[8]["value"] == math.inf
    record["validation"] = never["validation"] = {"accuracy": 0.5}
    assert shown[0].cell.score(record) == -3.0 > shown[0].cell.score(never)
    choice = Choice(1e-2, {}, False)
    of = [
        (replace(run, cell=replace(run.cell, seed=seed)), found, choice)
        for run in shown
        for seed, found in enumerate((record, never))
    ]
    found = compute(mamba.contrasts(gather_lines(of, mamba.measured_values)))
    assert len(found) == 4 and {x["low"] for x in found} == {None}  # a run that never found it
    checks = mamba.controls([(run, never) for run in control])
    assert [one.passed for one in checks] == [False, True]
