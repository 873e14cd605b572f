"""How eval.speed times: in turn, repeated, in a process made ready as a training's."""

from __future__ import annotations

import torch

from eval.speed import timing
from eval.speed.timing import WARM_UPS, summary, time_in_turn, times_as_fast

CPU = torch.device("cpu")


def test_process_is_made_ready_before_it_is_timed(monkeypatch):
    kept: list[torch.device] = []
    monkeypatch.setattr(timing, "make_process_ready", kept.append)
    assert timing.open_device("cpu", None) == CPU and kept == [CPU]


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_in_turn(calls, CPU, repeats=3, min_seconds=0)
    assert "".join(order) == "a" * WARM_UPS + "b" * WARM_UPS + "ab" * 3
    assert all(len(timing.seconds) == 3 for timing in timings.values())


def test_short_calls_are_repeated_within_a_round():
    made = []
    timing = time_in_turn({"x": lambda: made.append(1)}, CPU, repeats=2, min_seconds=0.001)["x"]
    assert timing.calls_a_repeat > 1
    assert len(made) == WARM_UPS + 2 * timing.calls_a_repeat


def test_summary_has_inclusive_quartiles():
    found = summary([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found["median"], found["quartiles"], found["range"]) == (3.0, [2.0, 4.0], [1.0, 5.0])
    assert summary([2.0])["quartiles"] == [2.0, 2.0]


def test_ratios_are_taken_within_a_round():
    """One round was ten times slower for both."""
    ratio = times_as_fast([1.0, 10.0, 2.0], [2.0, 20.0, 2.0])
    assert (ratio["median"], ratio["range"]) == (2.0, [1.0, 2.0])
