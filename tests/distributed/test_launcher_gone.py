"""A launcher that is killed: its ranks notice by themselves, save where they can, and end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cat_lm.core.errors import REQUEUE_EXIT_CODE
from cat_lm.training.checkpoint import find_checkpoint, step_of
from tests.conftest import REPOSITORY
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import train
from tests.runs import losses, run_values, write_config
from tests.slurm.cluster import environments, wait_for

BIN = Path(sys.executable).parent
PR_SET_CHILD_SUBREAPER = 36
MARK = "CAT_LM_TEST_OF_KILLED_LAUNCHERS"


@pytest.fixture
def adopting(tmp_path) -> Iterator[None]:
    """This process becomes the parent of orphans below it, so that it learns their exit codes."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    for process in started(tmp_path):
        os.kill(process, signal.SIGKILL)


def start(folder: Path, *command: object) -> subprocess.Popen:
    """Starts a launcher; what it starts can be found by a mark in its environment."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=REPOSITORY,
        env={
            **os.environ,
            **{MARK: str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
        stdout=open(folder / "output", "w"),
        stderr=subprocess.STDOUT,
    )


def started(folder: Path) -> dict[int, dict[str, str]]:
    """The environments of all processes that live below a launcher of this test."""
    return {p: found for p, found in environments() if found.get(MARK) == str(folder)}


def ranks(folder: Path) -> dict[int, int]:
    """Process id of each rank that lives."""
    return {int(e["RANK"]): p for p, e in started(folder).items() if "RANK" in e}


def exit_code(process: int) -> int:
    """Of an adopted process, once it has ended."""
    ended = wait_for(lambda: (found := os.waitpid(process, os.WNOHANG))[0] and found, "end")
    return os.waitstatus_to_exitcode(ended[1])


def endless(data: Path, folder: Path, **train: object) -> Path:
    """A run whose end is never reached, and whose rates do not depend on it."""
    values = constant(data, folder, 10**6, **train)
    values["checkpoint"]["every_steps"] = 10**6
    return write_config(folder, values)


def constant(data: Path, folder: Path, steps: int, **train: object) -> dict:
    values = run_values(data, folder / "run", max_steps=steps, **train)
    values["optimizer"] |= {"schedule": "constant"}
    values["validation"] = {"every_steps": 10**6, "max_tokens": 512}
    return values


def wait_for_a_step(folder: Path, launcher: subprocess.Popen) -> None:
    metrics = folder / "run/metrics.jsonl"

    def trains() -> bool:
        assert launcher.poll() is None, (folder / "output").read_text()
        return metrics.exists() and metrics.stat().st_size > 0

    wait_for(trains, "step", seconds=180)


@pytest.mark.long
def test_ranks_of_a_killed_torchrun_save_and_end(adopting, tiny_corpus, tmp_path):
    """And the run goes on to the losses of one that was never interrupted."""
    config = endless(tiny_corpus, tmp_path)
    torchrun = start(
        tmp_path, BIN / "torchrun", "--standalone", "--nproc-per-node=2", "train.py", config
    )
    wait_for_a_step(tmp_path, torchrun)
    orphans = ranks(tmp_path)
    assert set(orphans) == {0, 1}
    torchrun.kill()
    torchrun.wait()
    assert [exit_code(orphans[rank]) for rank in (0, 1)] == [REQUEUE_EXIT_CODE] * 2
    output = (tmp_path / "output").read_text()
    assert f"the launcher (process {torchrun.pid}) is gone: a checkpoint follows" in output
    stopped = step_of(find_checkpoint(tmp_path / "run"))
    assert f"stopped by a signal after step {stopped}" in output

    run_on_ranks(train, 2, constant(tiny_corpus, tmp_path, stopped + 5, resume="auto"))
    straight = tmp_path / "straight"
    straight.mkdir()
    run_on_ranks(train, 2, constant(tiny_corpus, straight, stopped + 5))
    assert losses(tmp_path / "run") == losses(straight / "run")


@pytest.mark.nightly
def test_ranks_of_a_killed_deepspeed_save_and_end(adopting, tiny_corpus, tmp_path):
    """The command itself, which is not the ranks' own parent, and lets that one live."""
    port = 20_000 + os.getpid() % 20_000
    config = endless(tiny_corpus, tmp_path)
    deepspeed = start(
        *(tmp_path, BIN / "deepspeed", "--num_gpus=2", f"--master_port={port}", "train.py", config)
    )
    wait_for_a_step(tmp_path, deepspeed)
    deepspeed.kill()
    deepspeed.wait()
    wait_for(lambda: not ranks(tmp_path), "end of the ranks", seconds=180)
    assert find_checkpoint(tmp_path / "run")


def test_a_rank_in_the_rendezvous_ends_with_its_launcher(adopting, tiny_corpus, tmp_path):
    """The second rank never comes, so the first waits for it until its launcher is killed."""
    config = endless(tiny_corpus, tmp_path)
    only_the_first = 'if [ "$RANK" = 1 ]; then exec sleep 1000; fi; exec "$@"'
    torchrun = start(
        *(tmp_path, BIN / "torchrun", "--standalone", "--nproc-per-node=2", "--no-python"),
        *("sh", "-c", only_the_first, "sh", sys.executable, "train.py", config),
    )
    wait_for(lambda: meets(ranks(tmp_path).get(0)), "connection to the meeting point", 180)
    first = ranks(tmp_path)[0]
    torchrun.kill()
    torchrun.wait()
    assert exit_code(first) == REQUEUE_EXIT_CODE
    said = [x for x in (tmp_path / "output").read_text().splitlines() if "rank 0 on" in x]
    assert len(said) == 1 and f"the launcher (process {torchrun.pid}) is gone" in said[0], said
    assert not (tmp_path / "run").exists()


def meets(rank: int | None) -> bool:
    """Whether a rank is connected to the port where the ranks meet."""
    environment = dict(environments()).get(rank, {})
    if "MASTER_PORT" not in environment:
        return False
    port, sockets = int(environment["MASTER_PORT"]), set()
    for handle in Path(f"/proc/{rank}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(handle))
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{rank}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            there = int(fields[2].rpartition(":")[2], 16)
            if there == port and fields[3] == "01" and f"socket:[{fields[9]}]" in sockets:
                return True
    return False
