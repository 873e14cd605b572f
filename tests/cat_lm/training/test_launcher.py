"""Which process is the launcher, and when it is gone, on a `/proc` of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cat_lm.training import launcher as launchers
from cat_lm.training.launcher import find_launcher

VARIABLES = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "CROSS_RANK", "CROSS_SIZE")
VARIABLES += ("SLURM_STEP_NUM_TASKS", "SLURM_TASK_PID")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "CROSS_RANK": "0"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2"}


class Processes:
    """A `/proc`, and this process's parent in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(launchers, "_PROC", folder)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)

    def add(self, process: int, program: str, parent: int, **environment: str) -> None:
        folder = self.folder / str(process)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{process} (a ) b) S {parent} 1 1")
        (folder / "cmdline").write_text(program + "\0")
        (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in environment.items()))

    def start(self, parent: int, **environment: str) -> None:
        """This process: a child of `parent` with these variables."""
        self.monkeypatch.setattr(os, "getppid", lambda: parent)
        for name, value in environment.items():
            self.monkeypatch.setenv(name, value)


@pytest.fixture
def processes(tmp_path, monkeypatch) -> Processes:
    return Processes(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}]
)
def test_by_hand_there_is_nobody_to_miss(processes, variables):
    processes.add(20, "bash", parent=1)
    processes.start(20, **variables)
    assert find_launcher() is None


@pytest.mark.parametrize("variables", [TORCHRUN, DEEPSPEED])
def test_the_launcher_is_the_parent(processes, variables):
    processes.add(20, "bash", parent=1)
    processes.add(30, "python3.11", parent=20)
    processes.start(30, **variables)
    launcher = find_launcher()
    assert launcher.line == (30,) and not launcher.is_gone()
    processes.add(30, "python3.11", parent=1)  # a shell above it that ends is nothing to us
    assert not launcher.is_gone()
    processes.start(1)
    assert launcher.is_gone()


def test_wrappers_between_launcher_and_rank(processes):
    """They live on when the launcher is killed, with a parent of their own."""
    processes.add(30, "python3.11", parent=9, RANK="1")
    processes.add(40, "bash", parent=30, **TORCHRUN)
    processes.add(50, "nsys", parent=40, **TORCHRUN)
    processes.start(50, **TORCHRUN)
    launcher = find_launcher()
    assert launcher.line == (50, 40, 30) and not launcher.is_gone()
    processes.add(40, "bash", parent=1, **TORCHRUN)
    assert launcher.is_gone()


def test_a_launcher_outside_of_the_container_is_not_seen(processes):
    processes.start(0, **TORCHRUN)
    assert find_launcher() is None
    processes.start(0, **SRUN, SLURM_TASK_PID="4711")
    processes.monkeypatch.delenv("RANK")
    assert find_launcher() is None


def test_deepspeed_on_one_machine_is_two_programs(processes):
    processes.add(20, "python3.11 bin/deepspeed", parent=1)
    processes.add(30, "python3.11", parent=20)
    processes.start(30, **DEEPSPEED, CROSS_SIZE="1")
    launcher = find_launcher()
    assert launcher.line == (30, 20) and not launcher.is_gone()
    processes.add(30, "python3.11", parent=1)
    assert launcher.is_gone()


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_step_daemon_of_slurm(processes, wrapped):
    processes.add(30, "slurmstepd", parent=1)
    processes.add(40, "bash", parent=30)
    processes.start(40 if wrapped else 30, **SRUN)
    processes.monkeypatch.setenv("SLURM_TASK_PID", "40" if wrapped else str(os.getpid()))
    launcher = find_launcher()
    assert launcher.line == ((40, 30) if wrapped else (30,)) and not launcher.is_gone()
    processes.add(40, "bash", parent=1)
    processes.start(40 if wrapped else 1)
    assert launcher.is_gone()
