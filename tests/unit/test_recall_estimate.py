"""The estimate of a grid's time: what it counts, and that it times real steps."""

from __future__ import annotations

import dataclasses

import pytest

from cat_lm.data.manifest import read_manifest
from eval.lab import estimate
from eval.recall.train import cost
from eval.recall.train.language import LanguageCell
from tests.unit.test_recall_stack import BASE, three


def test_the_estimate_is_all_steps_and_tests_of_every_group(monkeypatch):
    timed = []

    def seconds(cell, size, device):
        timed.append((cell.mixer, cell.train_examples, size))
        return 2.0 * size, 0.3 * size

    monkeypatch.setattr(cost, "recall_seconds", seconds)
    alike = three(epochs=4, eval_steps=None, test_lengths=(32,), fixed_items=True)
    none = dataclasses.replace(alike[0], mixer="none")
    found = estimate.hours_by_mixer([alike, alike[:1], [none], [none]], "cpu")
    # 4 epochs of 3 steps, validated on 40 rows; tests of as many, once and 2 of twice the length.
    one = (12 * 2.0 + 0.3 / 3 * (40 * 4 + 40 * (1 + 4))) / 3600
    assert found == pytest.approx({"cat": 4 * one, "none": 2 * one})
    # Each kind once, by itself and as a stack, and as short as a batch.
    assert timed == [("cat:dropout=0", 32, 3), ("cat:dropout=0", 32, 1), ("none", 32, 1)]


def test_on_a_cpu_few_rows_tell_what_all_cost(monkeypatch):
    rows_timed = []

    def seconds(step, rows):
        rows_timed.append(rows)
        return 0.5 + 0.25 * rows

    monkeypatch.setattr(estimate, "_seconds", seconds)
    monkeypatch.setattr(cost, "_steps", lambda *_: lambda rows: None)
    cell = dataclasses.replace(BASE, batch_size=512)
    assert cost.recall_seconds(cell, 1, "cpu") == pytest.approx((0.5 + 0.25 * 512, 0.25))
    assert max(rows_timed) == 16
    assert cost.recall_seconds(dataclasses.replace(BASE, batch_size=1), 1, "cpu")[0] > 0


@pytest.mark.parametrize("fixed", [0.5, 5.0])
def test_a_language_models_start_is_no_part_of_its_steps(fixed, monkeypatch):
    """Seconds of a run: `fixed`, 0.4 for each step and 0.1 for each row of it."""

    def run(cell, device, *, quiet):
        return {"seconds": {"training": fixed + (0.4 + 0.1 * cell.batch_size) * cell.steps}}

    monkeypatch.setattr(LanguageCell, "run", run)
    cell = LanguageCell("data", "0", "cat", 16, 32, 1, 100, 1e-3, batch_size=8)
    assert cost.language_seconds(cell.timed(1), "cpu") == pytest.approx((1.2, 0.1))
    hours = estimate.hours_by_mixer([[cell]], "cpu")
    rows = cell.tested_rows / 3
    assert hours == pytest.approx({"cat": (100 * 1.2 + rows * 0.1) / 3600})


def test_the_estimate_times_real_steps_of_models_alone_stacked_and_on_text(tiny_corpus):
    fingerprint = read_manifest(tiny_corpus)["fingerprint"]
    text = LanguageCell(str(tiny_corpus), fingerprint, "cat", 16, 32, 1, 10, 1e-3, batch_size=2)
    for group in (three(), three()[:1], [text]):
        (hours,) = estimate.hours_by_mixer([group], "cpu").values()
        assert 0 <= hours < 1 and (hours > 0 or group == [text])  # nine small steps and one
