"""Commands in processes forked from one that has imported torch, transformers and DeepSpeed.

A command of these guards takes a second or two, and its imports would take eight.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import socket
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.guards.models import ROOT


@dataclass
class Command:
    """A command of the project, run on so many ranks; it must end with exit code 0.

    Attributes:
        words: `train.py …`, or `-m module …`.
        log: receives stdout and stderr of all ranks.
    """

    words: list[str]
    log: Path
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=dict)


# Yields its commands one after the other; what lies between reads their results.
Job = Generator[Command, None, None]


def prepare_environment() -> None:
    """Set what the processes inherit: one thread each, no GPU, no hub, nothing of SLURM."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "COLUMNS": "100",
    }
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        del os.environ[name]


def run_jobs(jobs: Iterable[Job]) -> None:
    """Run the jobs, as many processes at once as there are cores.

    Raises:
        RuntimeError: a command failed; the text has the end of its log.
    """
    _import_libraries()
    waiting, running = deque(jobs), {}
    while waiting or running:
        busy = sum(command.ranks for _, command, _ in running.values())
        while waiting and (not running or busy < (os.cpu_count() or 1)):
            job = waiting.popleft()
            if (command := next(job, None)) is not None:
                pids = _start(command)
                running[min(pids)] = (job, command, pids)
                busy += command.ranks
        if running:
            first = next(iter(running))
            job, command, pids = running.pop(first)
            _wait(command, pids)
            waiting.appendleft(job)


def _import_libraries() -> None:
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch

    import cat_lm.model  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()


def _start(command: Command) -> list[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pids = []
    for rank in range(command.ranks):
        sys.stdout.flush()
        if pid := os.fork():
            pids.append(pid)
            continue
        environment = dict(command.environment)
        if command.ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(command.ranks), "MASTER_PORT": str(port)}
            environment |= {"LOCAL_WORLD_SIZE": str(command.ranks), "MASTER_ADDR": "127.0.0.1"}
        _be_command(command, environment)
    return pids


def _be_command(command: Command, environment: dict[str, str]) -> None:
    """Run the command in this forked process, and end it."""
    code: object = 1
    try:
        log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= environment
        os.chdir(ROOT)
        first, *rest = command.words
        sys.argv = rest if first == "-m" else command.words
        if first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _wait(command: Command, pids: list[int]) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        text = command.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command.words)}: exit codes {codes}\n{text}")
