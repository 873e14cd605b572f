"""The fuzz test finds what is wrong; a few hundred of its cases, by a fixed seed, find nothing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import schedule, verdict
from tests.fuzz.fakes import DEEDS, STEP
from tests.fuzz.mutations import damage
from tests.fuzz.pool import Templates, make_world, own_all, scratch_folder
from tests.fuzz.report import Report
from tests.fuzz.targets import BY_NAME, TARGETS
from tests.fuzz.values import ODD, odd_line

SEED, CASES, MORE_CASES = 2026, 12, 330
# Those whose single call takes seconds.
SLOW = ("doctor", "streams", "speed-conv", "speed-lengths", "report", "sweep", "sweep-text")
SLOW += ("zero-shot-table",)
EXPECTED = {
    **{"fine": [], "refused": [], "trace": ["traceback"], "code": ["exit code"]},
    **{"silent": ["message"], "chatty": ["message"], "lines": ["message"], "hang": ["hang"]},
    **{"wait": ["hang"], "eat": ["memory"], "ask": ["prompt", "traceback"]},
    **{"leave": ["left behind"], "delete": ["outside"], "change": ["outside"]},
    **{"escape": ["outside"], "accept": [], "lose": ["lost checkpoint"], "nan": ["nonsense"]},
}


@pytest.fixture(scope="module")
def fakes():
    with scratch_folder() as scratch:
        world = scratch / "world"
        (world / STEP).mkdir(parents=True)
        (world / "in.bin").write_bytes(bytes(64))
        (world / "neighbour.txt").write_text("not yours")
        for name in ("weights", "complete.json"):
            (world / STEP / name).write_text(name)
        own_all(world)
        templates = Templates(scratch, 0)
        yield templates
        templates.close()


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(d, marks=pytest.mark.long) if d in ("wait", "leave", "hang") else d
        for d in DEEDS
    ],
)
def test_what_a_command_does_wrong_is_found(fakes, deed):
    record = fakes.case(f"fake-{deed}-plain-0", 0)
    kinds = [failure["kind"] for failure in record["failures"]]
    # Code 2 is not what these usually end with.
    assert [kind for kind in kinds if kind != "harness"] == EXPECTED[deed], record


@pytest.mark.parametrize("number", range(3))
def test_damage_must_be_noticed(fakes, number):
    """By one command, which refuses it, and not by another, which is reported."""
    record = fakes.case(f"fake-fine-file-{number}", 0)
    assert record["damaged"] == "in.bin"
    removed = "Traceback" in record["stderr"]  # of a file that is gone or no file
    assert [f["kind"] for f in record["failures"]] == (["traceback"] if removed else [])
    record = fakes.case(f"fake-accept-file-{number}", 0)
    assert [f["kind"] for f in record["failures"]] == ["accepted damage"]


def test_options_come_from_the_parser(fakes):
    lines = [fakes.case(f"fake-fine-line-{i}", 0)["odd"] for i in range(60)]
    names = {line.partition(" = ")[0] for line in lines}
    assert {"--new-option", "--flag", "--number"} <= names and "--help" not in names
    assert len({line.partition(" = ")[2] for line in lines}) > len(ODD) / 2


def test_one_value_of_a_line_is_odd():
    line = ("run", "--lengths", "16,32", "--print", "a.b=1", "--", "--seed", "3")
    for seed in range(200):
        new, what, value = odd_line(
            line,
            {"--lengths": True, "--print": False, "--x": True},
            {"run"},
            (),
            random.Random(seed),
        )
        assert new[0] == "run" and "--print" in new and "--" in new
        assert what in ("--lengths", "a.b", "--seed", "--x") and value in ODD
        assert any(value in word for word in new)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.yaml", "x.bin", "x.safetensors"])
def test_damage_changes_the_file_in_many_ways(tmp_path, name):
    def write(path: Path) -> None:
        if name == "x.safetensors":
            from safetensors.numpy import save_file

            save_file({"a": np.ones(8, np.float32)}, path)
        else:
            path.write_text(json.dumps({"files": {"model/a.bin": 3}, "step": 1}) + "\n")

    said = set()
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write(folder / name)
        write(folder / f"other-{name}")
        before = (folder / name).read_bytes()
        said.add(damage(folder / name, random.Random(seed), tmp_path).split(" ")[0])
        path = folder / name
        assert path.is_symlink() or not path.is_file() or path.read_bytes() != before
    assert len(said) >= 5


def test_schedule_is_decided_by_the_seed_and_reaches_every_target():
    def first(seed: int, count: int) -> list[str]:
        return list(itertools.islice(schedule.cases(TARGETS, seed), count))

    assert first(1, 50) == first(1, 50) != first(2, 50)
    assert {name.rpartition("-")[0].rpartition("-")[0] for name in first(1, 20_000)} == {
        target.name for target in TARGETS
    }


@pytest.mark.parametrize(
    ("stderr", "right"),
    [
        ("error: x: wrong\n", True),
        ("step 1: loss 2\nerror: x: wrong\n", True),
        ("error: c.yaml: \n  a: wrong\n  b: wrong\n", True),
        ("usage: p [-h]\np: error: argument --a: invalid\n", True),
        ("error: c.yaml: wrong\n  and so on\n", False),
        ("x.py:3: UserWarning: old\nerror: x: wrong\n", False),
        ("usage: p [-h]\n", False),
        ("error: \n", False),
    ],
)
def test_one_message(stderr, right):
    assert (verdict._message(stderr) is None) == right


def test_weights_that_are_not_finite_are_seen(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(4, np.float32)}, path)
    assert verdict.nonsense(path) is None
    save_file({"a": np.array([1, np.inf], np.float16)}, path)
    assert verdict.nonsense(path) == "a weight is not finite"
    path.write_bytes(b"no")
    assert verdict.nonsense(path) == "is no safetensors file"


@pytest.fixture(scope="module")
def report_of():
    """What the cases of these names found: report_of(names) -> Report."""
    with scratch_folder() as scratch:
        templates = Templates(scratch, 0)
        make_world(templates, with_harness=False)

        def run(names: Iterable[str]) -> Report:
            report = Report(None, SEED)
            for name in names:
                report.add(templates.case(name, SEED), templates.place)
            return report

        yield run
        templates.close()


SAMPLED = [t for t in TARGETS if t.family != "harness" and t.name not in SLOW]


@pytest.mark.long
def test_a_few_dozen_cases_end_well(report_of):
    """A sample of what `python -m tests.fuzz` runs for an hour."""
    names = itertools.islice(schedule.cases(SAMPLED, SEED), CASES)
    report = report_of((*schedule.plain_cases(SAMPLED), *names))
    assert not report.causes, report.text()
    used = {name for name, counts in report.counts.items() if counts["accepted"]}
    assert used == {target.name for target in SAMPLED if BY_NAME[target.name].usual == 0}


@pytest.mark.nightly
def test_a_few_hundred_more_cases_end_well(report_of):
    report = report_of(itertools.islice(schedule.cases(SAMPLED, SEED), CASES, MORE_CASES))
    assert not report.causes, report.text()
