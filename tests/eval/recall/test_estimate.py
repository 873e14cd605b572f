"""The estimate of a grid's time: what it counts, and that it times real steps."""

from __future__ import annotations

import dataclasses

import pytest

from eval.lab import estimate
from eval.recall.cell import Cell
from tests.eval.recall.test_stack import three


def test_the_estimate_is_all_steps_and_tests_of_every_group(monkeypatch):
    timed = []

    def step_seconds(step, rows, device):
        (cell, size) = step
        timed.append((cell.mixer, cell.train_examples, size))
        return 2.0 * size, 0.3 * size

    monkeypatch.setattr(Cell, "step", lambda cell, size, device: (cell, size))
    monkeypatch.setattr(estimate, "step_seconds", step_seconds)
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
    assert estimate.step_seconds(None, 512, "cpu") == pytest.approx((0.5 + 0.25 * 512, 0.25))
    assert max(rows_timed) == 16
    assert estimate.step_seconds(None, 1, "cpu")[0] > 0
