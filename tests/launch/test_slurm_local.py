"""`launch.slurm local`: the loop of the batch script without SLURM, its signals and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.slurm import local
from launch.slurm.folder import RunFolder
from launch.slurm.local import Local
from launch.slurm.options import Options
from tests.conftest import REPOSITORY
from tests.runs import run_values, write_config

# Instead of train.py: a rank that waits for what the test does to it.
RANK = """
import os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["RUN"])
caught = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: caught.append(number))
place = run / f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}.pid"
place.with_suffix(".tmp").write_text(str(os.getpid()))
place.with_suffix(".tmp").rename(place)
until, torchrun = time.monotonic() + 60, os.getppid()
while not caught and os.getppid() == torchrun and time.monotonic() < until:
    time.sleep(0.01)
if os.getppid() != torchrun:
    time.sleep(3)  # as long as a checkpoint takes
    os._exit(75)
(run / "caught").open("a").write(f"{os.environ['RANK']} {signal.Signals(caught[0]).name}\\n")
time.sleep(0.3)
sys.stdout.flush()
os._exit(130 if caught[0] == signal.SIGINT else 75)
"""


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.code.mkdir(parents=True)
    return folder


@pytest.fixture
def looped(folder, monkeypatch) -> Callable[..., tuple[int, int]]:
    """Runs the loop over attempts that end with these codes: (the last code, attempts made)."""

    def run(*codes: int, told_to_end: bool = False, progress: bool = False) -> tuple[int, int]:
        local, left = Local(folder, Options(tasks_per_node=2, max_restarts=3)), list(codes)

        def attempt() -> int:
            local.told_to_end = told_to_end
            if progress:
                step = folder.checkpoints / f"step-{len(left):08d}"
                step.mkdir(parents=True)
                (step / "complete.json").write_text("{}")
            return left.pop(0)

        monkeypatch.setattr(local, "attempt", attempt)
        return local.run(), len(codes) - len(left)

    return run


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], (0, 1)),
        ([2, 0], (2, 1)),
        ([75, 0, 0], (0, 2)),
        ([1, 137, 0], (0, 3)),
        ([76, 1, 1, 0], (2, 3)),  # a crash loop
    ],
)
def test_exit_code_decides_about_another_attempt(looped, codes, expected):
    assert looped(*codes) == expected


def test_loop_told_to_end_ends(looped):
    assert looped(75, 0, told_to_end=True) == (75, 1)
    assert looped(130, 0, told_to_end=True) == (130, 1)


def test_attempts_are_noted(looped, folder, capsys):
    assert looped(1, 1, 1, 0) == (2, 3)
    assert len(folder.attempt_lines()) == 3
    assert "3 attempts in a row began at checkpoint none" in capsys.readouterr().err
    assert looped(0) == (2, 0)
    folder.reset_attempts("local")
    assert looped(0) == (0, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus-per-node", "2"], "this machine shows 1 GPU;"),
        (["--nodes", "2"], "is required"),
        (["--gpus-per-node", "1", "--tasks", "2"], "not allowed with"),
        (["--tasks", "3"], "micro_batch_size x ranks"),
    ],
)
def test_ranks_that_one_machine_cannot_have_are_one_line(place, options, said, monkeypatch):
    monkeypatch.setattr(local, "count_gpus", lambda variables: 1)
    assert said in place.fails("local", place.config, *options)
    assert not place.run_folder.run.exists()


def test_gpus_are_counted_in_the_environment_of_the_ranks(monkeypatch):
    seen = {}

    def run(command, env, **how):
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, "3\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert local.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert seen["CUDA_VISIBLE_DEVICES"] == "0,1,2" and "PATH" in seen


def test_gpus_that_are_there_are_used(place, monkeypatch):
    monkeypatch.setattr(local, "count_gpus", lambda variables: 2)
    monkeypatch.setattr(Local, "run", lambda self: 7)
    assert place("local", place.config, "--gpus-per-node", 2) == (7, "", "")


def wait_for(path: Path, process: subprocess.Popen) -> str:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    text = path.read_text()
    path.unlink()
    return text


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_closed_terminal_ends_the_loop_unless_nohup_keeps_it_off(folder, before, monkeypatch):
    local, found = Local(folder, Options(tasks_per_node=1)), signal.signal(signal.SIGHUP, before)
    monkeypatch.setattr(local, "attempt", lambda: os.kill(os.getpid(), signal.SIGHUP) or 2)
    try:
        local.run()
        assert local.told_to_end == (before is signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, found)


@pytest.mark.long
def test_signals_and_killed_ranks_under_torchrun(tmp_path):
    """A killed rank, USR1 and a killed torchrun start the ranks again, TERM ends it.

    After a killed torchrun its ranks have ended before others begin.

    As from a terminal, signals go to the whole process group, in which torchrun must not be.
    """
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("cat_lm", "launch"):
        (checkout / name).symlink_to(REPOSITORY / name)
    (tmp_path / "data").mkdir()
    config = write_config(tmp_path, run_values(tmp_path / "data", tmp_path / "run"))
    program = (
        "import pathlib, sys; from launch.slurm import __main__ as program, snapshot;"
        f"snapshot.PROJECT = pathlib.Path({str(checkout)!r}); program.main()"
    )
    (checkout / "train.py").write_text(RANK)
    run = tmp_path / "run"
    options = ("--tasks", "2", "--env", f"RUN={run}", "--max-restarts", "9")
    process = subprocess.Popen(
        [sys.executable, "-c", program, "local", config, *options],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    places = [run / f"rank-{rank}-of-2.pid" for rank in range(2)]

    def ranks() -> list[int]:
        return [int(wait_for(place, process)) for place in places]

    os.kill(ranks()[1], signal.SIGKILL)
    ranks()
    os.killpg(process.pid, signal.SIGUSR1)
    orphans = ranks()
    os.kill(int(Path(f"/proc/{orphans[0]}/stat").read_text().split()[3]), signal.SIGKILL)
    ranks()
    assert not any(Path(f"/proc/{orphan}").exists() for orphan in orphans)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    says = [line.partition(" local: ")[2] for line in err.splitlines() if " local: " in line]
    assert says == [
        "restart 0, 2 ranks, checkpoint none",
        "exit code 137: started again",
        "restart 1, 2 ranks, checkpoint none",
        "exit code 75: started again",
        "restart 2, 2 ranks, checkpoint none",
        "exit code 137: started again",
        "restart 3, 2 ranks, checkpoint none",
        "exit code 75: stopped; train.resume=auto goes on",
    ], err
    caught = (run / "caught").read_text().split("\n")
    assert {"0 SIGUSR1", "1 SIGUSR1", "0 SIGTERM", "1 SIGTERM"} <= set(caught)
