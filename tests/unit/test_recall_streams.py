"""The ablation of streams: its grid, its small language model, its table."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cat_lm.data.corpus import TokenCorpus
from cat_lm.errors import UserError
from eval.recall import streams
from eval.recall.language import LanguageCell, _rate
from eval.recall.mixers import Setting, make_mixer
from eval.recall.mixers._convolution import ConvolvedProjections
from eval.recall.mixers.cat import Options


@pytest.fixture(scope="module")
def cell(tiny_corpus: Path) -> LanguageCell:
    fingerprint = TokenCorpus.open(tiny_corpus, "train").fingerprint
    return LanguageCell(str(tiny_corpus), fingerprint, "cat", 32, 32, 1, 60, 1e-2, batch_size=8)


def test_a_small_language_model_learns_and_is_repeatable(cell, tiny_corpus):
    record = cell.run("cpu", quiet=True)
    unigram = TokenCorpus.open(tiny_corpus, "train").manifest["unigram_loss"]
    assert record["loss"] < unigram - 0.3
    assert record == {**cell.run("cpu", quiet=True), "seconds": record["seconds"]}
    split = TokenCorpus.open(tiny_corpus, "validation")
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
        rows.append((run, {"best_accuracy": value, "loss": 1 - value}))
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
