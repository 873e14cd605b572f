"""eval.speed --processes: each row under the policy that suits it, ratios over the processes."""

from __future__ import annotations

import argparse
import copy
import os
from itertools import product

import pytest

from cat_lm.errors import UserError
from eval.speed import join, processes, tables
from eval.speed.__main__ import _parser
from tests.unit import speed_child


def conv_record(seconds: dict[str, float], refused: str | None = None) -> dict:
    """A process's record of one case, with a row for each kernel in both directions."""
    case = {"conv_type": "head", "window": 3, "batch": 1, "time": 8, "heads": 2, "head_dim": 4}
    rows = []
    for name, value in seconds.items():
        of_way = {"seconds": {"median": value, "range": [value, value]}}
        of_way |= {"times_as_fast_as_conv1d": None, "times_as_fast_range": None}
        of_way |= {"of_copy_bandwidth": 0.5}
        row = {"kernel": name, "refused": refused if name == "ours" else None}
        times = {} if row["refused"] else {"forward": of_way, "forward_backward": of_way}
        rows.append(row | copy.deepcopy(times))
    result = {
        "case": case | {"dtype": "float32"},
        "backend": {"name": "cpu", "reason": "fast", "runs": "a kernel"},
        "kernels": rows,
        "floor_bytes": {"forward": 10, "forward_backward": 20},
        "copy_bytes_per_second": 100.0,
        "absent": {},
    }
    wrong = [{"case": "c", "kernel": "ours", "reason": refused}] if refused else []
    return {
        "benchmark": "conv",
        "device": {"type": "cpu", "threads": 2, "openmp": {}},
        "machine": "a machine",
        "repeats": 3,
        "cases": [result],
        "refused": wrong,
    }


def test_each_row_is_taken_under_its_own_policy():
    """PASSIVE slows the rival five times, and helps ours; neither suffers for the other."""
    records = {
        "default": [conv_record({"ours": 1.25, "conv1d": t}) for t in (10.0, 8.0, 12.0)],
        "passive": [conv_record({"ours": t, "conv1d": 50.0}) for t in (1.0, 1.0, 2.0)],
    }
    joined = join.join(records)
    ours, rival = joined["cases"][0]["kernels"]
    for direction, floor in (("forward", 10), ("forward_backward", 20)):
        assert ours[direction]["seconds"]["policy"] == "passive"
        assert rival[direction]["seconds"]["policy"] == "default"
        assert ours[direction]["seconds"]["all"] == [1.0, 1.0, 2.0]
        assert ours[direction]["seconds"]["tried"]["default"] == [1.25] * 3
        # Round by round: 10 / 1, 8 / 1, 12 / 2.
        assert ours[direction]["times_as_fast_as_conv1d"] == 8.0
        assert ours[direction]["times_as_fast_range"] == [6.0, 10.0]
        assert ours[direction]["bytes_per_second"] == floor
        assert ours[direction]["of_copy_bandwidth"] == floor / 100
    assert joined["processes"] == {"of_each_policy": 3, "policies": {"default": {}, "passive": {}}}
    # The records themselves stay what they were.
    assert records["default"][0]["cases"][0]["kernels"][0]["forward"]["seconds"]["median"] == 1.25
    text = tables.conv_table(joined)
    assert "6.00-10.00" in text and "in each of 3 processes" in text


def test_a_row_that_one_process_refused_is_refused():
    fine, wrong = ({"ours": 1.0, "conv1d": 2.0}, "dx is off")
    records = {"default": [conv_record(fine), conv_record(fine, wrong)]}
    joined = join.join(records)
    ours, rival = joined["cases"][0]["kernels"]
    assert ours["refused"] == wrong and len(joined["refused"]) == 1
    assert rival["forward"]["times_as_fast_as_conv1d"] == 1.0
    assert f"refused: ours: {wrong}" in tables.conv_table(joined)


def train_record(pythia: float, cat: float, **changes) -> dict:
    rows = {
        name: {
            "model": name,
            "step_seconds": {"median": seconds},
            "tokens_per_second": 32 / seconds,
            "mfu": 0.1 / seconds,
            "peak_memory_bytes": 7 * 2**20,
        }
        for name, seconds in (("pythia", pythia), ("cat", cat))
    }
    return {
        "benchmark": "train",
        "device": {"type": "cpu"},
        "results": rows,
        "absent": {},
    } | changes


def test_training_is_joined():
    records = {
        "default": [train_record(4.0, 5.0), train_record(3.0, 4.0), train_record(4.0, 4.0)],
        "active": [train_record(2.0, 9.0), train_record(2.0, 9.0), train_record(2.0, 9.0)],
    }
    rows = join.join(records)["results"]
    assert rows["pythia"]["step_seconds"]["policy"] == "active"
    assert rows["cat"]["step_seconds"]["policy"] == "default"
    assert rows["cat"]["tokens_per_second"] == pytest.approx(8.0)
    assert rows["cat"]["mfu"] == pytest.approx(0.1 / 4)
    assert rows["cat"]["relative_to_plain"] == 0.5
    assert rows["cat"]["relative_range"] == [0.4, 0.5]
    assert rows["cat"]["peak_memory_bytes"] == 7 * 2**20


def test_a_model_that_is_absent_once_is_absent():
    less = train_record(1.0, 1.0, absent={"cat": "failed"})
    del less["results"]["cat"]
    joined = join.join({"default": [train_record(1.0, 1.0), less]})
    assert joined["results"].keys() == {"pythia"} and joined["absent"] == {"cat": "failed"}


def test_decoding_is_joined():
    def record(rate: float) -> dict:
        rates = ("cached", "cold", "uncached")
        row = {f"tokens_per_second_{name}": {"median": rate} for name in rates}
        row |= {"prompt_seconds": {"median": 1 / rate}, "tokens_per_second_cold": {"median": 2.0}}
        return {"benchmark": "decode", "device": {"type": "cpu"}, "results": [row]}

    (row,) = join.join({"default": [record(3.0)], "bound": [record(5.0)]})["results"]
    # Of rates the largest is best, of seconds the smallest.
    for name in ("tokens_per_second_cached", "prompt_seconds"):
        assert row[name]["policy"] == "bound"
    assert row["tokens_per_second_cold"]["median"] == 2.0 and row["cache_speedup"] == 1.0


# The processes

ASKED = argparse.Namespace(benchmark="conv", processes=2, kept=7)


@pytest.mark.parametrize(("device", "policies"), [("cpu", 4), ("cuda", 1)])
def test_processes_take_turns_among_policies(monkeypatch, device, policies):
    """A GPU's times do not depend on them."""
    order = []

    def measured(options, policy):
        order.append((policy, getattr(options, "peak_memory", True)))
        return train_record(1.0, 1.0, device={"type": device})

    monkeypatch.setattr(processes, "_measure_apart", measured)
    record = processes.measure_in_processes(ASKED)
    names = list(processes.POLICIES)[:policies]
    assert [policy for policy, _ in order] == names * 2
    # Memory is measured once.
    assert [memory for _, memory in order] == [True] + [False] * (2 * policies - 1)
    assert record["processes"]["of_each_policy"] == 2 and "command" in record


def test_a_process_has_its_policy_and_nobody_else(monkeypatch):
    monkeypatch.setattr(processes, "measure", speed_child.environment)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    before = dict(os.environ)
    found = processes._measure_apart(ASKED, "bound")
    expected = {"OMP_WAIT_POLICY": None, "OMP_PROC_BIND": "TRUE", "OMP_NUM_THREADS": "1"}
    assert found == expected | {"kept": 7}
    assert dict(os.environ) == before


def test_a_process_that_dies_is_one_line(monkeypatch):
    monkeypatch.setattr(processes, "measure", speed_child.die)
    with pytest.raises(UserError, match=r"^--processes: a measuring process died"):
        processes._measure_apart(ASKED, "default")


def test_what_has_rivals_takes_processes():
    for benchmark, given in product(("conv", "train", "decode"), ("1", "5")):
        options = _parser().parse_args([benchmark, "--processes", given])
        assert options.processes == int(given)
        assert _parser().parse_args([benchmark]).processes is None
    for arguments in (["conv", "--processes", "0"], ["stacks", "--processes", "5"]):
        with pytest.raises(UserError):
            _parser().parse_args(arguments)
