"""Select, CumSum and CumMax by their definitions, position for position."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.long_range.tasks import make_task

ROWS = np.arange(20)


def test_cumsum_and_cummax_by_their_definitions():
    for name in ("cumsum", "cummax"):
        task = make_task(f"{name}:seq_len=24")
        batch = task.load("train").batch(ROWS)
        assert batch.inputs.shape == (20, 24, task.channels) and batch.labels.shape == (20, 24)
        for row, values in zip(batch.inputs[:, :, 0].tolist(), batch.labels, strict=True):
            for i in range(24):
                so_far = row[: i + 1]
                wanted = max(so_far) if name == "cummax" else sum(so_far) / math.sqrt(i + 1)
                assert values[i] == pytest.approx(wanted, abs=1e-5)


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


def test_select_tells_the_marked_numbers_in_order():
    task = make_task("select:noise=20,marked=5")
    batch = task.load("train").batch(ROWS)
    assert (task.length, task.scored, task.channels) == (30, 5, 4)
    for inputs, values in zip(batch.inputs, batch.labels, strict=True):
        marked = np.flatnonzero(inputs[:, 1])
        assert len(marked) == 5 and marked.max() < 25 and set(inputs[:, 1]) == {0, 1}
        assert (values == inputs[marked, 0]).all()
        assert (inputs[25:, :2] == 0).all()
        assert np.abs(inputs[:25, 0]).max() == 1  # marked and others together
    places = {int(p) for row in batch.inputs for p in np.flatnonzero(row[:, 1])}
    assert len(places) > 20  # anywhere


def test_a_row_depends_on_seed_split_and_number_alone():
    task = make_task("cumsum:seq_len=16")
    examples = task.load("train")
    one = examples.batch(np.array([7]))
    among = examples.batch(np.array([3, 7, 191_999]))
    assert (one.inputs[0] == among.inputs[1]).all()
    others = [
        task.load("test"),
        make_task("cumsum:seq_len=16,seed=1").load("train"),
    ]
    for other in others:
        assert not (other.batch(np.array([7])).inputs[:, :, 0] == one.inputs[:, :, 0]).any()
    fewer = make_task("cumsum:seq_len=16,train=10").load("train")
    assert (fewer.batch(np.array([7])).inputs == one.inputs).all()
    # numpy's counter-based bits and normal numbers; another stream needs another `version`
    assert task.version == 1
    assert one.inputs[0, :3, 0].tolist() == pytest.approx(GOLDEN, abs=1e-6)


GOLDEN = [-0.6554977, -0.3495613, -0.7215571]


def test_rows_beyond_the_last_are_refused():
    examples = make_task("cumsum:train=10").load("train")
    with pytest.raises(IndexError):
        examples.batch(np.array([10]))
    assert len(examples) == 10 and examples.labels is None


def test_smaller_subsets_are_within_larger_ones():
    examples = make_task("cummax:seq_len=8,train=50").load("train")
    rows = [
        {row.tobytes() for row in examples.subset(count, 3).batch(np.arange(count)).inputs}
        for count in (5, 20, 50)
    ]
    assert rows[0] < rows[1] < rows[2] and len(rows[2]) == 50
    assert (examples.subset(5, 3).lengths == 8).all()
