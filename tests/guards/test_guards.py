"""The guards against their golden files, and faults that the guards must see."""

from __future__ import annotations

import copy

import pytest

from tests.commands import Command, finish
from tests.guards import speed
from tests.guards.__main__ import GROUPS, read_golden
from tests.guards.comparison import differences


@pytest.mark.parametrize("group", GROUPS)
def test_measurements_equal_golden_files(group):
    finish(Command("-m", "tests.guards", group))


@pytest.mark.parametrize("group", ["losses", "values"])
def test_changed_number_is_reported(group):
    golden = read_golden(group)
    changed = copy.deepcopy(golden)
    case = next(iter(changed.values()))
    numbers = case[3] if group == "losses" else case["logits"]
    numbers[1] *= 1 + (1e-2 if group == "losses" else 1e-8)
    assert len(differences(group, golden, changed, exact=False)) == 1
    assert differences(group, golden, golden, exact=True) == []


def test_missing_and_new_cases_are_reported():
    lines = differences("formats", {"a": [1], "b": "x"}, {"a": [1], "c": "x"}, exact=False)
    assert lines == ["formats: b: is missing", "formats: c: is new"]


def test_speed_fails_only_with_whole_interval_below_ratio():
    slow = [(1.0, 1.1 + 0.001 * n) for n in range(9)]
    unsure = [(1.0, 0.9 if n % 2 else 1.2) for n in range(9)]
    assert speed.ratio_interval(slow)[2] < speed.LEAST_RATIO
    assert speed.ratio_interval(unsure)[2] > speed.LEAST_RATIO
