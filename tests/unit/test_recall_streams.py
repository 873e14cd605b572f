"""The ablation of streams: its grid, its small language model, its table."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from cat_lm.data.opening import open_corpus
from cat_lm.errors import UserError
from cat_lm.mixers import Setting, make_mixer
from cat_lm.mixers.cat import Options
from cat_lm.mixers.modules.projections import ConvolvedProjections
from eval.recall.grids import streams
from eval.recall.grids.plan import Run
from eval.recall.train.language import LanguageCell, _rate


@pytest.fixture(scope="module")
def cell(tiny_corpus: Path) -> LanguageCell:
    fingerprint = open_corpus(tiny_corpus, "train").fingerprint
    return LanguageCell(str(tiny_corpus), fingerprint, "cat", 32, 32, 1, 60, 1e-2, batch_size=8)


def test_a_small_language_model_learns_and_is_repeatable(cell, tiny_corpus):
    record = cell.run("cpu", quiet=True)
    unigram = open_corpus(tiny_corpus, "train").manifest["unigram_loss"]
    assert record["loss"] < unigram - 0.3
    assert record == {**cell.run("cpu", quiet=True), "seconds": record["seconds"]}
    split = open_corpus(tiny_corpus, "validation")
    assert record["tokens_scored"] == min(split.num_tokens - 1, 256 * 32)  # each token once
    other = dataclasses.replace(cell, seed=1).run("cpu", quiet=True)
    assert other["loss"] != record["loss"]
    with pytest.raises(UserError, match="changed since"):
        dataclasses.replace(cell, fingerprint="0" * 64).run("cpu")


def test_the_rate_rises_over_a_tenth_and_falls_to_a_tenth():
    rates = [_rate(step, 100) for step in range(1, 101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and math.isclose(rates[-1], 0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_shared_keys_and_values_differ_by_their_filters_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 7, 8)
    for place in ("after", "before"):
        layer = ConvolvedProjections(8, Options(streams=None, shared_kv=True, place=place), True)
        q, k, v = layer(x)
        assert torch.equal(k, v) and not torch.equal(q, k)
        layer = ConvolvedProjections(8, Options(streams="k", shared_kv=True, place=place), True)
        torch.nn.init.normal_(layer.projection.bias) if place == "after" else None
        q, k, v = layer(x)
        taps = layer.filters["k"][0]
        past = F.pad(v[:, :, 0], (0, 0, 2, 0))
        if place == "after":
            expected = sum(taps[j] * past[:, 2 - j : 9 - j] for j in range(3))
            torch.testing.assert_close(k[:, :, 0], expected)
    delta = make_mixer("deltanet:streams=none,shared_kv=true").build(Setting(8))
    assert torch.equal(delta._stream("k", x), delta._stream("v", x))
    with pytest.raises(UserError, match="expand_v=1"):
        make_mixer("gated-deltanet:shared_kv=true").build(Setting(8))


def test_the_grid_has_every_subset_of_every_mixer_once(tiny_corpus):
    for scale in streams.SCALES.values():
        runs = streams.plan(scale, str(tiny_corpus))
        assert len({run.cell for run in runs}) == len(runs)
        lines = {(run.row, run.column, run.line) for run in runs}
        assert len(lines) == 2 * 4 * (8 + 5)
        for run in runs:
            options = make_mixer(run.cell.mixer).options
            subset = run.line.removeprefix("K = V, ")
            assert (options.streams or "none") == subset
            assert options.shared_kv == run.line.startswith("K = V") and options.window == 4
            assert run.cell.layers == 1 or run.row == streams.LANGUAGE
            if run.row == streams.RECALL:
                run.cell.make_task()
    with pytest.raises(UserError, match="no such folder"):
        streams.plan(streams.SCALES["smoke"], "nowhere")


def test_the_best_rate_is_the_highest_accuracy_and_the_lowest_loss(tiny_corpus):
    scale = dataclasses.replace(
        streams.SCALES["smoke"], rates=(1e-3, 1e-2), text_rates=(1e-3, 1e-2), seeds=2
    )
    rows = []
    for run in streams.plan(scale, str(tiny_corpus)):
        good = (run.cell.lr == 1e-3) == (run.row == streams.LANGUAGE)
        value = 0.25 * (run.cell.seed + 1) if good else 0.1
        rows.append((run, {"accuracy": value, "loss": 1 - value}))
    lines = streams.summary(rows)
    recall = next(x for x in lines if x["row"] == streams.RECALL)
    text = next(x for x in lines if x["row"] == streams.LANGUAGE)
    assert (recall["best_lr"], recall["mean"], recall["min"], recall["max"]) == (
        1e-2,
        0.375,
        0.25,
        0.5,
    )
    assert (text["best_lr"], text["mean"], text["min"], text["max"]) == (1e-3, 0.625, 0.5, 0.75)
    assert "| K = V, k | 0.375 (0.250 to 0.500) |" in streams.table(lines)
    assert len(streams.draw(lines).axes) == 2


def rows_of(row: str, mixer: str, subset: str, found: dict[float, tuple[float, ...]]) -> list:
    """Runs with the accuracies or losses of each learning rate."""
    name = "accuracy" if row == streams.RECALL else "loss"
    return [
        (Run(row, mixer, subset, SimpleNamespace(lr=rate)), {"accuracy": 0.0, name: value})
        for rate, values in found.items()
        for value in values
    ]


@pytest.mark.parametrize("row", [streams.RECALL, streams.LANGUAGE])
def test_a_diverged_rate_is_the_last_choice_and_an_edge_is_told(row):
    middle = (0.5, 0.75) if row == streams.RECALL else (2.5, 2.75)
    worse = (0.25,) if row == streams.RECALL else (3.0,)
    found = {1e-2: middle, 1e-3: (math.nan, 0.625), 3e-2: worse}
    for rates in permutations(found.items()):
        (line,) = streams.summary(rows_of(row, "DeltaNet", "k", dict(rates)))
        assert line["best_lr"] == 1e-2 and not line["best_lr_on_grid_edge"]
        assert (line["min"], line["max"]) == middle and line["mean"] == sum(middle) / 2
        assert line["runs"].keys() == {"0.01", "0.001", "0.03"}
        assert line["runs"]["0.01"] == list(middle)
    for other in (1e-3, 3e-2):
        (line,) = streams.summary(rows_of(row, "DeltaNet", "k", {1e-2: middle, other: worse}))
        assert line["best_lr"] == 1e-2 and line["best_lr_on_grid_edge"]
    (line,) = streams.summary(rows_of(row, "DeltaNet", "k", {1e-2: middle}))
    assert not line["best_lr_on_grid_edge"]  # no grid
    (line,) = streams.summary(rows_of(row, "DeltaNet", "k", {1e-2: (math.nan,)}))
    assert math.isnan(line["mean"])


@pytest.fixture
def lines() -> list[dict]:
    """Two mixers on recall with three rates, one of them on text with one."""
    rates = {1e-3: (0.25,), 1e-2: (0.5, 0.5, 0.875), 3e-2: (0.375,)}
    rows = rows_of(streams.RECALL, "DeltaNet", "k", rates)
    rows += rows_of(streams.RECALL, "DeltaNet", "kv", {**rates, 3e-2: (0.75,)})
    rows += rows_of(streams.RECALL, "softmax attention", "k", {1e-2: (0.125,)})
    rows += rows_of(streams.RECALL, "softmax attention", "kv", {1e-2: (1.0,)})
    rows += rows_of(streams.LANGUAGE, "DeltaNet", "k", {1e-2: (2.5, 2.625)})
    return streams.summary(rows)


def test_the_table_has_every_number_in_its_place(lines):
    recall, text = streams.table(lines).split("text: validation loss")
    assert "| convolved | DeltaNet | softmax attention |" in recall
    assert "| k | 0.625 (0.500 to 0.875) | 0.125 (0.125 to 0.125) |" in recall
    assert "| kv | 0.750 (0.750 to 0.750) | 1.000 (1.000 to 1.000) |" in recall
    assert "is on its grid's edge in 1 of 2." in recall
    assert "| convolved | DeltaNet |" in text and "| k | 2.562 (2.500 to 2.625) |" in text
    assert "One learning rate was run." in text
    table = list(csv.DictReader(io.StringIO(streams._csv(lines))))
    names = ("row", "mixer", "streams", "best_lr", "best_lr_on_grid_edge", "mean", "min", "max")
    assert table == [{name: str(line[name]) for name in names} for line in lines]


def test_the_picture_has_recall_above_text_and_bars_from_least_to_most(lines):
    found = {}
    for axes in streams.draw(lines).axes:
        for points in axes.containers:
            middle, _, (bars,) = points.lines
            ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
            found[axes.get_title(loc="left"), points.get_label()] = [
                *middle.get_ydata().tolist(),
                *ends,
            ]
    assert found == {
        ("MQAR", "DeltaNet"): [0.625, 0.75, [0.5, 0.875], [0.75, 0.75]],
        ("MQAR", "softmax attention"): [0.125, 1.0, [0.125, 0.125], [1.0, 1.0]],
        ("text", "DeltaNet"): [2.5625, [2.5, 2.625]],
        ("text", "softmax attention"): [],
    }
