"""The launcher of this process: its environment variables, and whether it is still running.

For torchrun, deepspeed and srun, the same variables are set. A launcher that is killed (SIGKILL,
out of memory) cannot end its ranks; the kernel then gives them another parent process. The chain of
parent processes up to the launcher, including wrappers such as a shell or `numactl`, is therefore
recorded at the start. The launcher is gone when a link of the chain has changed. Torch-free.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError

_PORTS = range(1, 65536)
_PROC = Path("/proc")


def world_size() -> int:
    """Return the number of ranks. Raises UserError if the launcher's variable is invalid."""
    if _under_srun():
        return _number("SLURM_STEP_NUM_TASKS", range(1, 1 << 31))
    return _number("WORLD_SIZE", range(1, 1 << 31)) if "WORLD_SIZE" in os.environ else 1


def join_launcher() -> tuple[int, int, int]:
    """Return (rank, local rank, world size), and set the variables that torch reads.

    Raises UserError if the launcher's variables are incomplete or invalid.
    """
    env, ranks = os.environ, world_size()
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun and deepspeed set both.
        rank, local_rank = _number("RANK", range(ranks)), _number("LOCAL_RANK", range(ranks), 0)
    elif _under_srun():
        rank = _number("SLURM_PROCID", range(ranks))
        local_rank = _number("SLURM_LOCALID", range(ranks), 0)
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = _first_host(env.get("SLURM_STEP_NODELIST", ""))
        # Every job and every restart has another port, below those that systems assign, because
        # jobs may share a node. All ranks compute the same port.
        job, start = (int(env.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "RESTART_COUNT"))
        env.setdefault("MASTER_PORT", str(12_000 + (job + 7919 * start) % 20_000))
    else:
        rank, local_rank, ranks = 0, 0, 1
    if ranks > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(
                f"{ranks} ranks were started without {' and '.join(missing)}: "
                "set them to the first node's name and a free port"
            )
        _number("MASTER_PORT", _PORTS)
    env.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(ranks))
    return rank, local_rank, ranks


def _under_srun() -> bool:
    """Return True if srun started this process; a batch script has no variables of a step."""
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return not torchrun and "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_PROCID" in os.environ


def _number(name: str, allowed: range, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or int(text) not in allowed:
        raise UserError(
            f"{name}={text}: a launcher sets it to a number from {allowed[0]} to {allowed[-1]}; "
            "unset it to start one rank"
        )
    return int(text)


def _first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: `n003` for `n[003-004,9],m1`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodelist)
    if not match:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r}: names no host to meet at")
    return "".join(part or "" for part in match.groups())


@dataclass(frozen=True)
class Launcher:
    """The launcher of this process; `line` has the process ids from the parent up to it."""

    line: tuple[int, ...]

    def is_gone(self) -> bool:
        links = zip((os.getpid(), *self.line), self.line, strict=False)
        # 0 is unknown. If a wrapper has ended, the link below it has changed.
        return any(_parent(child) not in (parent, 0) for child, parent in links)


def find_launcher() -> Launcher | None:
    """Return the launcher above this process: torchrun, deepspeed or SLURM's step daemon.

    Return None if the process was started by hand, or the launcher is not visible, as in a
    container with its own process ids. Call it early, since a launcher that has ended cannot be
    found.
    """
    env, line = os.environ, [os.getppid()]
    given = [name for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK") if name in env]
    if "RANK" in env and given:
        # The processes that a launcher starts have its variable, and the launcher itself has not.
        while line[-1] > 1 and f"\0{given[0]}=".encode() in b"\0" + _read(line[-1], "environ"):
            line.append(_parent(line[-1]))
        # On one machine, `deepspeed` starts another program, which starts the ranks.
        above = _parent(line[-1])
        if env.get("CROSS_SIZE") == "1" and b"deepspeed" in _read(above, "cmdline"):
            line.append(above)
    elif "SLURM_STEP_NUM_TASKS" in env and env.get("SLURM_TASK_PID", "").isdigit():
        task, line = int(env["SLURM_TASK_PID"]), [os.getpid()]
        while line[-1] not in (task, 0):
            line.append(_parent(line[-1]))
        line = [*line[1:], _parent(line[-1])]
    else:
        return None
    return Launcher(tuple(line)) if line[-1] > 0 else None


def _parent(process: int) -> int:
    """Return the id of a process's parent; 0 if there is none that this process can see."""
    if process == os.getpid():
        return os.getppid()
    # The command's name, in parentheses, may contain spaces and parentheses.
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(process: int, name: str) -> bytes:
    """Return a file of `/proc`; empty if the process has ended or belongs to another user."""
    try:
        return (_PROC / str(process) / name).read_bytes()
    except OSError:
        return b""
