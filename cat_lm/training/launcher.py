"""The launcher of this process: its variables, and whether it is still there.

torchrun, deepspeed and srun end in the same variables. A launcher that is killed (SIGKILL, no
memory left) cannot end its ranks: the kernel gives them another parent. So the line of processes
from this one up to its launcher is remembered at the start, wrappers such as a shell or `numactl`
included; the launcher is gone when a link of it has changed. Imports nothing heavy.
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
    """Return the number of ranks; raise UserError where a launcher's variable is no number."""
    if _under_srun():
        return _number("SLURM_STEP_NUM_TASKS", range(1, 1 << 31))
    return _number("WORLD_SIZE", range(1, 1 << 31)) if "WORLD_SIZE" in os.environ else 1


def join_launcher() -> tuple[int, int, int]:
    """Return rank, local rank and world size, and set the variables that torch reads to match.

    Raises UserError where the launcher's are incomplete or wrong.
    """
    env, ranks = os.environ, world_size()
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, deepspeed
        rank, local_rank = _number("RANK", range(ranks)), _number("LOCAL_RANK", range(ranks), 0)
    elif _under_srun():
        rank = _number("SLURM_PROCID", range(ranks))
        local_rank = _number("SLURM_LOCALID", range(ranks), 0)
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = _first_host(env.get("SLURM_STEP_NODELIST", ""))
        # Jobs that share a node get ports of their own, below those that systems hand out, and
        # starts of a job, too; all ranks compute the same one.
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
    """Return True if srun started this process; a batch script itself has no step's variables."""
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
    """The first name of a SLURM node list: `n[003-004,9],m1` begins with `n003`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodelist)
    if not match:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r}: names no host to meet at")
    return "".join(part or "" for part in match.groups())


@dataclass(frozen=True)
class Launcher:
    """The process that started this one: `line` has the ids from this one's parent up to it."""

    line: tuple[int, ...]

    def is_gone(self) -> bool:
        links = zip((os.getpid(), *self.line), self.line, strict=False)
        # 0 is unknown: where a wrapper has ended, the link below it has changed.
        return any(_parent(child) not in (parent, 0) for child, parent in links)


def find_launcher() -> Launcher | None:
    """Find the launcher above this process: torchrun, deepspeed or SLURM's step daemon.

    None without one, as after a start by hand, and where it cannot be seen, from inside a container
    with its own process ids. Must be called early: one that dies before is not missed.
    """
    env, line = os.environ, [os.getppid()]
    given = [name for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK") if name in env]
    if "RANK" in env and given:
        # What the launcher starts has its variable, the launcher has not.
        while line[-1] > 1 and f"\0{given[0]}=".encode() in b"\0" + _read(line[-1], "environ"):
            line.append(_parent(line[-1]))
        # `deepspeed` on one machine starts another program of its own, which starts the ranks.
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
    """Return the parent's id; 0 where there is none, or none that this process can see."""
    if process == os.getpid():
        return os.getppid()
    # The command's name, in parentheses, may hold anything.
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(process: int, name: str) -> bytes:
    """Read a file of `/proc`; empty where the process has ended or is another user's."""
    try:
        return (_PROC / str(process) / name).read_bytes()
    except OSError:
        return b""
