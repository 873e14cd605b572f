"""tests/gpu/run.sh: its order, its limits, and what it leaves when steps fail or it is killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from cat_lm.config import load_config
from cat_lm.errors import UserError
from eval.speed.__main__ import _parser
from eval.speed.choices import conv_types
from tests.commands import Command
from tests.conftest import REPOSITORY
from tests.gpu import __main__ as entry
from tests.gpu import runs, session
from tests.gpu.plan import Step, plan
from tests.gpu.session import Session
from tests.served import served_python
from tests.unit.calls import call_main

ABOUT = {"commit": "abc", "rehearsal": True, "device": {"type": "cpu"}, "versions": {"torch": "2"}}
WRITE = "import json, sys, time; json.dump({'step': sys.argv[2]}, open(sys.argv[1], 'w'))"


def step(name: str, code: str = "", minutes: float = 1, **fields) -> Step:
    """A step that writes its record and then does `code`."""
    return Step(
        name, (sys.executable, "-c", f"{WRITE}; {code}", "{record}", name), minutes, **fields
    )


def run(out: Path, steps: list[Step], seconds: float = 60) -> tuple[int, dict[str, dict]]:
    """The exit code, and the summary's rows by name."""
    code = Session(out, seconds, ABOUT).run(steps)
    return code, {row["name"]: row for row in summary(out)["steps"]}


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def test_steps_run_in_order_and_one_that_fails_does_not_stop_the_rest(tmp_path):
    steps = [
        step("first"),
        step("bad", "print('much'); sys.exit('error: no memory for this')"),
        step("silent", "sys.exit(3)"),
        step("raising", "print('x', flush=True); 1 / 0"),
        step("slow", "time.sleep(60)", minutes=0.02),
        Step("empty", (sys.executable, "-c", "")),
        step("lacks", needs=("no_such_module_at_all",)),
        step("absent", needs=("no_such_module_at_all",), optional=True),
        step("last"),
    ]
    code, rows = run(tmp_path, steps)
    assert code == 1
    assert list(rows) == [s.name for s in steps]
    assert [row["status"] for row in rows.values()] == [
        *(
            "passed",
            "failed",
            "failed",
            "failed",
            "timed out",
            "failed",
            "lacks",
            "absent",
            "passed",
        )
    ]
    assert rows["bad"]["error"] == "error: no memory for this" and rows["bad"]["exit_code"] == 1
    assert rows["silent"]["error"] == "no output" and rows["empty"]["error"] == "left no record"
    assert rows["raising"]["error"] == "ZeroDivisionError: division by zero"
    assert rows["lacks"]["error"] == "no_such_module_at_all is not installed"
    assert "much" in (tmp_path / "bad.log").read_text()
    for name in ("first", "last"):
        assert json.loads((tmp_path / f"{name}.json").read_text()) == {"step": name}
    assert rows["first"]["started"] <= rows["bad"]["started"] <= rows["last"]["started"]
    assert summary(tmp_path)["ended"] == "all steps are done"


def test_what_is_optional_and_absent_is_no_failure(tmp_path):
    needs = {"needs": ("no_such_module_at_all",)}
    assert run(tmp_path, [step("absent", optional=True, **needs)])[0] == 0
    assert run(tmp_path, [step("lacks", **needs)])[0] == 1


def test_the_time_limit_is_kept(tmp_path, monkeypatch):
    """A step that is longer than what is left is cut off, and none is begun after it."""
    monkeypatch.setattr(session, "LEAST_SECONDS", 0.5)
    started = time.monotonic()
    steps = [step("quick"), step("long", "time.sleep(600)"), step("never")]
    code, rows = run(tmp_path, steps, seconds=3)
    assert time.monotonic() - started < 60
    assert [row["status"] for row in rows.values()] == ["passed", "cut off", "not reached"]
    assert code == 0 and not (tmp_path / "never.json").exists()
    assert summary(tmp_path)["ended"] == "the time is over"


def test_the_same_folder_goes_on_with_what_has_not_passed(tmp_path):
    flag = tmp_path / "mended"
    check = f"sys.exit(0 if __import__('os').path.exists({str(flag)!r}) else 'error: broken')"
    steps = [step("good"), step("bad", check)]
    assert run(tmp_path, steps)[0] == 1
    first = (tmp_path / "good.json").stat().st_mtime_ns
    flag.touch()
    code, rows = run(tmp_path, steps)
    assert code == 0 and {row["status"] for row in rows.values()} == {"passed"}
    assert (tmp_path / "good.json").stat().st_mtime_ns == first
    with pytest.raises(UserError, match="holds a session with commit abc, this one's is def"):
        Session(tmp_path, 60, ABOUT | {"commit": "def"}).run(steps)


def start_command(out: Path, code: str) -> subprocess.Popen:
    """The command itself, with two steps: one that passes and one that does `code`."""
    program = (
        "import sys\nfrom tests.gpu import session\nfrom tests.unit import test_gpu_session as t\n"
        f"session.plan = lambda rehearsal: [t.step('first'), t.step('second', {code!r})]\n"
        "session.about = lambda rehearsal: t.ABOUT\n"
        f"sys.argv = ['run.sh', {str(out)!r}, '--rehearse']\nsession.main()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def is_alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_midway_it_leaves_what_it_had(tmp_path, number):
    pid = tmp_path / "pid"
    code = f"open({str(pid)!r} + '~', 'w').write(str(__import__('os').getpid())); "
    code += f"__import__('os').rename({str(pid)!r} + '~', {str(pid)!r}); time.sleep(600)"
    process = start_command(tmp_path / "out", code)
    while not pid.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    child, deadline = int(pid.read_text()), time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    assert json.loads((tmp_path / "out/first.json").read_text()) == {"step": "first"}
    found = summary(tmp_path / "out")
    assert [row["status"] for row in found["steps"]] == ["passed", "running"]
    ended = None if number == signal.SIGKILL else f"signal {number.name}"
    assert found["ended"] == ended and found["commit"] == "abc"


def test_tests_are_recorded_one_by_one(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n\n"
        "def test_none(): pytest.skip('no GPU')\n\n"
        "@pytest.fixture\ndef broken(): raise OSError('gone')\n\ndef test_error(broken): pass\n"
    )
    (tmp_path / "test_b.py").write_text("import no_such_module_at_all\n")
    record = tmp_path / "record.json"
    options = ("-p", "tests.gpu.recorder", "-p", "no:cacheprovider", "-c", os.devnull)
    options += ("--continue-on-collection-errors", "--rootdir", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--record", record, tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    found = json.loads(record.read_text())
    assert done.returncode == found["ended"] == 1, done.stdout
    tests = {test["name"].split("::")[-1]: test for test in found["tests"]}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_b.py": "failed",
        "test_good": "passed",
        "test_bad": "failed",
        "test_none": "skipped",
        "test_error": "failed",
    }
    assert tests["test_bad"]["message"] == "assert 1 == 2"
    assert "gone" in tests["test_error"]["message"] and "no GPU" in tests["test_none"]["message"]
    assert "no_such_module_at_all" in tests["test_b.py"]["message"]
    (tmp_path / "log").write_text("= much =\n")
    assert session._error(record, tmp_path / "log").startswith("3 failed, first ")


# The plan


@pytest.mark.parametrize("rehearsal", [False, True])
def test_every_step_is_a_command_that_exists(rehearsal):
    steps = plan(rehearsal)
    assert len({step_.name for step_ in steps}) == len(steps)
    speed = [step_ for step_ in steps if "eval.speed" in step_.command]
    for step_ in speed:
        words = step_.command[step_.command.index("eval.speed") + 1 :]
        options = _parser().parse_args([w.replace("{record}", "r.json") for w in words])
        assert getattr(options, "device", "auto") == (
            "cpu" if rehearsal and options.benchmark != "engine" else "auto"
        )
    for step_ in steps:
        if "tests.gpu.runs" in step_.command:
            words = step_.command[step_.command.index("tests.gpu.runs") + 1 :]
            words = [w.replace("{record}", "r.json") for w in words]
            options = runs.parser().parse_intermixed_args(words)
            asked = load_config(REPOSITORY / options.config, options.overrides)
            # `repeat` goes on from a checkpoint before the last.
            assert asked.total_steps == 12 == 2 * asked.checkpoint.every_steps
            assert asked.train.deterministic == step_.name.endswith("deterministic")
    benchmarks = {step_.command[step_.command.index("eval.speed") + 1] for step_ in speed}
    assert benchmarks == {"conv", "lengths", "train", "decode", "engine", "stacks"}
    tests = {word for step_ in steps for word in step_.command if word.endswith("_cuda.py")}
    there = {str(f.relative_to(REPOSITORY)) for f in REPOSITORY.glob("tests/gpu/test_*.py")}
    assert tests == there


def test_the_plan_asks_what_there_is_to_measure():
    names = [step_.name for step_ in plan(rehearsal=False)]
    assert {f"conv-{kind}" for kind in conv_types()} <= set(names)
    assert {"engine-pythia", "engine-cat-rope", "engine-mh-cat-rope"} <= set(names)
    assert names.index("engine-pythia") < names.index("engine-cat-rope-1b4")
    assert not any("7b" in name or "base" in name for name in names)
    # First what ends a run at once, then tests, equal bits, and what is measured.
    assert names[:5] == ["doctor", "run", "tests", "same-bits", "same-bits-deterministic"]
    assert 4 < names.index("profile") < names.index("conv-head") < names.index("train")


# Runs that are compared


def start_runs(monkeypatch, tmp_path, lines: list[list[float]], *overrides: str) -> dict:
    """The record of `repeat`, where runs write these losses and norms from their first step on."""
    left = iter(lines)

    def train(config: Path, overrides: list[str], run: Path) -> None:
        last = run / "checkpoints/step-00000012"
        kept = (run / "metrics.jsonl").read_text().splitlines()[:1] if run.exists() else []
        assert not last.exists() and (run / "checkpoints/step-00000006").is_dir() == bool(kept)
        for folder in (last, last.with_name("step-00000006")):
            folder.mkdir(parents=True, exist_ok=True)
        rows = [
            json.dumps({"step": 6 * (i + 1), "loss": loss, "grad_norm": 1.0})
            for i, loss in enumerate(next(left))
        ]
        (run / "metrics.jsonl").write_text("\n".join(kept + rows[len(kept) :]))

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "call", lambda *words: None)
    record, others = tmp_path / "bits.json", tmp_path / "bits/others"
    others.mkdir(parents=True, exist_ok=True)
    words = ("repeat", REPOSITORY / "configs/quickstart.yaml", *overrides, "--json", record)
    monkeypatch.setattr(sys, "argv", ["runs", *map(str, words)])
    try:
        runs.main()
    finally:
        found = json.loads(record.read_text())
    assert next(left, None) is None and others.is_dir() and not list(tmp_path.glob("bits-*"))
    return found


EQUAL = {"equal": True, "first_other_step": None, "largest_relative_difference": 0.0}


def test_runs_of_the_same_bits(monkeypatch, tmp_path, capsys):
    """Told where they part; an error where the same bits were promised."""
    same, other = [3.0, 2.0], [3.0, 2.5]
    found = start_runs(monkeypatch, tmp_path, [same] * 3, "train.deterministic=true")
    assert found["deterministic"] and found["run_to_run"] == found["resumed"] == EQUAL
    assert found["versions"] and found["commit"]
    found = start_runs(monkeypatch, tmp_path, [same, other, same])
    assert found["run_to_run"] == EQUAL | {
        "equal": False,
        "first_other_step": 12,
        "largest_relative_difference": 0.25,
    }
    assert found["resumed"]["largest_relative_difference"] == 0.2
    with pytest.raises(SystemExit):
        start_runs(monkeypatch, tmp_path, [same, same, other], "train.deterministic=true")
    assert "error: train.deterministic=true: resumed: step 12 has" in capsys.readouterr().err


def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path):
    def refused(*arguments: str) -> str:
        words = (tmp_path / "out", *arguments)
        code, _, error = call_main(entry.main, monkeypatch, capsys, "run.sh", *words)
        assert code == 2
        assert len(error.splitlines()) == 1 and error.startswith("error: ")
        assert not (tmp_path / "out").exists()
        return error

    import torch

    if not torch.cuda.is_available():
        assert "no CUDA GPU" in refused()
    assert "--minutes: '0' must be from" in refused("--minutes", "0")
    assert "no step begins with 'sing'; there are doctor, run, tests" in refused(
        "--steps", "test,sing"
    )
    monkeypatch.setattr(entry, "BASE", ("torch", "no_such_module_at_all"))
    assert "lacks the modules no_such_module_at_all" in refused()


def check_records(out: Path) -> dict[str, str]:
    """The statuses of a rehearsal's steps; every record must be whole."""
    found = summary(out)
    assert found["ended"] == "all steps are done" and found["commit"]
    for row in found["steps"]:
        if row["status"] == "passed":
            record = json.loads((out / row["record"]).read_text())
            assert record["versions"] == found["versions"] and record["commit"] == found["commit"]
    return {row["name"]: row["status"] for row in found["steps"]}


def test_a_rehearsal_of_some_steps(tmp_path):
    """The command itself; the steps are interpreters of their own."""
    chosen = "tests,conv-qkv-fp32,train-flash"
    command = ["bash", str(REPOSITORY / "tests/gpu/run.sh"), str(tmp_path), "--rehearse"]
    done = subprocess.run(
        [*command, "--steps", chosen],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_records(tmp_path) == {
        "tests": "passed",
        "train-flash": "absent",
        "conv-qkv-fp32": "passed",
    }


def forked(python: str, words: list[str], lines: BinaryIO) -> Command:
    """A step in the place of `session._start`'s: imports would be nearly all that it takes.

    Ranks and commands that it starts are `python`'s.
    """
    assert words[0] == sys.executable
    return Command(*words[1:], log=Path(lines.name), executable=python)


@pytest.mark.long
def test_a_rehearsal_of_everything(tmp_path, monkeypatch):
    steps = plan(rehearsal=True)
    with served_python() as python:
        monkeypatch.setattr(session, "_start", functools.partial(forked, python))
        code = Session(tmp_path, 36_000, session.about(rehearsal=True)).run(steps)
    found = check_records(tmp_path)
    failed = {row["name"]: row.get("error") for row in summary(tmp_path)["steps"]}
    assert code == 0, failed
    assert list(found) == [step_.name for step_ in steps]
    assert {name for name, status in found.items() if status != "passed"} == {"train-flash"}
