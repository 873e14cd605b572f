"""eval.speed --processes: each row under the policy that suits it, ratios over the processes."""

from __future__ import annotations

import argparse
import copy
import os
import signal
import threading
from functools import partial
from itertools import product

import pytest

from cat_lm.errors import UserError
from eval.common.interrupts import Stopped
from eval.speed import join, processes, tables
from eval.speed.__main__ import _parser
from eval.speed.conv import lengths
from tests.unit.speed import child


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
    assert rows["cat"]["relative_to_pythia"] == 0.5
    assert rows["cat"]["relative_to_pythia_range"] == [0.4, 0.5]
    assert rows["cat"]["peak_memory_bytes"] == 7 * 2**20


def test_a_family_without_a_plain_model_is_compared_with_pythia():
    def record(pythia: float, gla: float) -> dict:
        found = train_record(pythia, gla)
        found["results"]["gla"] = found["results"].pop("cat")
        return found

    records = {
        "default": [record(4.0, 5.0), record(3.0, 4.0), record(4.0, 4.0)],
        "active": [record(2.0, 9.0), record(1.0, 9.0), record(3.0, 9.0)],
    }
    row = join.join(records)["results"]["gla"]
    assert row["relative_to_plain"] is row["relative_range"] is None
    # Round by round: 2 / 5, 1 / 4, 3 / 4.
    assert row["relative_to_pythia"] == 0.4 and row["relative_to_pythia_range"] == [0.25, 0.75]


def test_a_model_that_is_absent_once_is_absent():
    less = train_record(1.0, 1.0, absent={"cat": "failed"})
    del less["results"]["cat"]
    joined = join.join({"default": [train_record(1.0, 1.0), less]})
    assert joined["results"].keys() == {"pythia"} and joined["absent"] == {"cat": "failed"}


def decode_record(*rates: float, prompts: tuple[int, ...] = (9, 5, 7)) -> dict:
    """A process's record of one model, whose shortest prompt stands second."""
    rows = []
    for rate, prompt in zip(rates, prompts, strict=False):
        kinds = ("cached", "cold", "uncached")
        row = {f"tokens_per_second_{name}": {"median": rate} for name in kinds}
        row |= {"prompt_seconds": {"median": 1 / rate}, "tokens_per_second_cold": {"median": 2.0}}
        ratio = None if prompt == min(prompts[: len(rates)]) else {"median": rate / rates[1]}
        row |= {"of_shortest_prompt": ratio, "case": {"prompt_tokens": prompt}}
        rows.append(row | {"name": "cat"})
    return {"benchmark": "decode", "device": {"type": "cpu"}, "results": rows}


def test_decoding_is_joined():
    records = {"default": [decode_record(3.0)], "bound": [decode_record(5.0)]}
    (row,) = join.join(records)["results"]
    assert row["of_shortest_prompt"] is None
    # Of rates the largest is best, of seconds the smallest.
    for name in ("tokens_per_second_cached", "prompt_seconds"):
        assert row[name]["policy"] == "bound"
    assert row["tokens_per_second_cold"]["median"] == 2.0 and row["cache_speedup"] == 1.0


def test_lengths_of_prompts_are_compared_under_one_policy():
    """Each is fastest under its own: a ratio of the two would say 3 / 2."""
    records = {
        "default": [decode_record(1.0, 2.0, 4.0), decode_record(1.5, 2.0, 3.0)],
        "bound": [decode_record(3.0, 1.0, 1.0), decode_record(3.0, 1.0, 1.0)],
    }
    first, shortest, last = join.join(records)["results"]
    assert first["tokens_per_second_cached"]["policy"] == "bound"
    assert shortest["tokens_per_second_cached"]["policy"] == "default"
    assert first["of_shortest_prompt"]["policy"] == "default"
    assert first["of_shortest_prompt"]["range"] == [0.5, 0.75]
    assert first["of_shortest_prompt"]["tried"] == {"default": [0.5, 0.75], "bound": [3.0, 3.0]}
    assert shortest["of_shortest_prompt"] is None
    assert last["of_shortest_prompt"]["all"] == [2.0, 1.5]


def test_contexts_are_joined():
    def record(sdpa: float, matmul: float, landmark: float) -> dict:
        seconds = {"sdpa": sdpa, "matmul": matmul, "landmark": landmark}
        part = {"seconds": {name: {"median": value} for name, value in seconds.items()}}
        row = {"layer": copy.deepcopy(part), "model": part, "layer_bytes": {"dense": 7}}
        return {"benchmark": "decode", "device": {"type": "cpu"}, "contexts": [row]}

    records = {
        "default": [record(6.0, 9.0, 2.0), record(8.0, 9.0, 2.0), record(6.0, 9.0, 1.0)],
        "passive": [record(9.0, 5.0, 4.0), record(9.0, 4.0, 4.0), record(9.0, 6.0, 4.0)],
    }
    (row,) = join.join(records)["contexts"]
    assert row["layer_bytes"] == {"dense": 7}
    for part in (row["layer"], row["model"]):
        policies = {name: values["policy"] for name, values in part["seconds"].items()}
        assert policies == {"sdpa": "default", "matmul": "passive", "landmark": "default"}
        assert part["dense"] == "matmul"
        # Round by round: 5 / 2, 4 / 2, 6 / 1.
        assert part["times_as_fast"]["all"] == [2.5, 2.0, 6.0]


def lengths_record(*rows: tuple[int, str, float], wrong: tuple[int, str] | None = None) -> dict:
    """A process's record of lengths, without the row that is `wrong`."""
    found = [
        {"time": time, "contender": name}
        | {way: {"seconds": {"median": seconds}} for way in lengths.DIRECTIONS}
        for time, name, seconds in rows
        if (time, name) != wrong
    ]
    refused = [{"time": wrong[0], "contender": wrong[1], "reason": "dx"}] if wrong else []
    return {
        "benchmark": "lengths",
        "device": {"type": "cpu", "threads": 2},
        "machine": "a machine",
        "repeats": 3,
        "case": {"window": 3, "batch": 1, "heads": 2, "head_dim": 4, "dtype": "float32"},
        "backends": {"ssm": {"name": "cpu"}},
        "rows": found,
        "refused": refused,
    }


HEAD = lengths.head_filters(3)


def test_lengths_are_joined():
    def record(head: float, long: float, longer: float) -> dict:
        return lengths_record((8, HEAD, head), (8, "ssm", long), (16, "ssm", longer))

    records = {
        "default": [record(4.0, 1.0, 2.0), record(6.0, 1.0, 2.0), record(4.0, 2.0, 2.0)],
        "active": [record(1.0, 4.0, 1.0), record(1.0, 4.0, 1.0), record(3.0, 4.0, 1.0)],
    }
    joined = join.join(records)
    _, row, longer = joined["rows"]
    for way in lengths.DIRECTIONS:
        assert row[way]["seconds"]["policy"] == "default"
        # Round by round, the head filters under the policy that suits them: 1 / 1, 1 / 1, 3 / 2.
        assert row[way]["times_as_fast_as_head"]["all"] == [1.0, 1.0, 1.5]
        assert row[way]["times_as_fast_as_attention"] is None
        # Of another length there is no rival.
        assert longer[way]["times_as_fast_as_head"] is None
        assert longer[way]["seconds"]["all"] == [1.0, 1.0, 1.0]
    text = tables.table(joined)
    assert "1.00 (1.00-1.50)" in text and "in each of 3 processes" in text


def test_a_length_that_one_process_refused_is_refused():
    rows = (8, HEAD, 1.0), (8, "ssm", 1.0), (16, "ssm", 1.0)
    wrong = lengths_record(*rows, wrong=(8, "ssm"))
    for records in ([wrong, lengths_record(*rows)], [lengths_record(*rows), wrong]):
        joined = join.join({"default": records})
        assert [(row["time"], row["contender"]) for row in joined["rows"]] == [
            (8, HEAD),
            (16, "ssm"),
        ]
        assert joined["refused"] == wrong["refused"]


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
    monkeypatch.setattr(processes, "measure", child.environment)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    before = dict(os.environ)
    found = processes._measure_apart(ASKED, "bound")
    expected = {"OMP_WAIT_POLICY": None, "OMP_PROC_BIND": "TRUE", "OMP_NUM_THREADS": "1"}
    assert found == expected | {"kept": 7}
    assert dict(os.environ) == before


def test_a_process_that_dies_is_one_line(monkeypatch):
    monkeypatch.setattr(processes, "measure", child.die)
    with pytest.raises(UserError, match=r"^--processes: a measuring process died"):
        processes._measure_apart(ASKED, "default")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_measuring_process_too(monkeypatch, request, tmp_path, number):
    """Otherwise it goes on, and slows down what is measured next."""
    # nohup has it ignored, which commands leave so.
    request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, signal.default_int_handler)
    monkeypatch.setattr(processes, "measure", child.hang)
    pipe, done, found = tmp_path / "pid", tmp_path / "done", []
    os.mkfifo(pipe)

    def stop() -> None:
        found.append(int(pipe.read_text()))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        processes._measure_apart(argparse.Namespace(kept=str(pipe), done=str(done)), "default")
    thread.join()
    assert not done.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(found[0], 0)


def test_what_has_rivals_takes_processes():
    for benchmark, given in product(("conv", "lengths", "train", "decode"), ("1", "5")):
        options = _parser().parse_args([benchmark, "--processes", given])
        assert options.processes == int(given)
        assert _parser().parse_args([benchmark]).processes is None
    for arguments in (["conv", "--processes", "0"], ["stacks", "--processes", "5"]):
        with pytest.raises(UserError):
            _parser().parse_args(arguments)
