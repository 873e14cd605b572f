"""Select, CumSum and CumMax by their definitions, position for position."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.long_range.tasks import make_task

ROWS = np.arange(20)


def test_numbers_are_normal_over_their_largest_magnitude():
    numbers = make_task("cumsum:seq_len=64").load("train").batch(np.arange(300)).inputs[:, :, 0]
    assert np.abs(numbers).max(axis=1) == pytest.approx(1)
    assert abs(numbers.mean()) < 5 * numbers.std() / np.sqrt(numbers.size)
    scaled = (numbers / numbers.std(axis=1, keepdims=True)).ravel()
    assert np.mean(scaled**4) == pytest.approx(3, abs=0.3)  # a normal's; a uniform's is 1.8


def test_positions_stand_beside_the_numbers():
    batch = make_task("select:noise=4,marked=2").load("test").batch(ROWS)
    angles = [2 * math.pi * i / 8 for i in range(8)]
    assert np.allclose(batch.inputs[:, :, -2], [math.cos(a) for a in angles], atol=1e-6)
    assert np.allclose(batch.inputs[:, :, -1], [math.sin(a) for a in angles], atol=1e-6)
