"""A watch on the launcher that started this rank. Imports nothing heavy.

A launcher that is killed (SIGKILL, no memory left) cannot end its ranks: the kernel gives them
another parent, init or a subreaper. So the line of processes from this one up to its launcher is
remembered at the start, wrappers such as a shell or `numactl` included; the launcher is gone when
a link of it has changed.

A rank that was started by hand, with or without a launcher's variables, has nobody to miss. A
closed terminal sends it a signal, on which it saves and stops (`stop`), or which nohup keeps off.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Beside process 1; those of containers and of user sessions.
_REAPERS = (b"systemd", b"init", b"tini", b"dumb-init", b"catatonit", b"containerd-shim")


@dataclass(frozen=True)
class Launcher:
    """The process that started this one.

    Attributes:
        line: process ids, from this process's parent up to the launcher.
        was_gone: it had ended before one could look; `line` leads to who adopted its ranks.
    """

    line: tuple[int, ...]
    was_gone: bool = False

    def is_gone(self) -> bool:
        links = zip((os.getpid(), *self.line), self.line, strict=False)
        # 0, unknown: where a wrapper has ended, the one below it tells.
        return self.was_gone or any(_parent(child) not in (parent, 0) for child, parent in links)


def find_launcher() -> Launcher | None:
    """The launcher above this process: torchrun, deepspeed or SLURM's step daemon.

    None without one, and where it cannot be seen, from inside a container with its own process ids.
    Must be called early: who dies before is noticed by what the parent is, which is less sure.
    """
    names = os.environ
    if "RANK" in names and "TORCHELASTIC_RUN_ID" in names:
        return _python_launcher("TORCHELASTIC_RUN_ID")
    if "RANK" in names and "CROSS_RANK" in names:
        return _python_launcher("CROSS_RANK")
    if "SLURM_STEP_NUM_TASKS" in names and names.get("SLURM_TASK_PID", "").isdigit():
        return _step_daemon(int(names["SLURM_TASK_PID"]))
    return None


def _python_launcher(variable: str) -> Launcher | None:
    """The nearest process above that was not itself started with a launcher's `variable`."""
    line = [os.getppid()]
    while line[-1] > 1 and _was_given(line[-1], variable):
        line.append(_parent(line[-1]))
    if line[-1] < 1:
        return None
    is_launcher, adopts = _is_python(line[-1]), _adopts(line[-1])
    if is_launcher is False and not adopts:
        # A shell, or any program that we do not know: variables of a launcher, set by hand.
        return None
    above = _parent(line[-1])
    # `deepspeed` on one machine starts another program of its own, which starts the ranks.
    if os.environ.get("CROSS_SIZE") == "1" and variable == "CROSS_RANK" and _is_python(above):
        line.append(above)
    # In a container, process 1 may be the launcher itself.
    return Launcher(tuple(line), was_gone=adopts and not is_launcher)


def _adopts(process: int) -> bool:
    """Return True if it is one that takes children whose parents have died."""
    return process == 1 or _read(process, "comm").strip() in _REAPERS


def _step_daemon(task: int) -> Launcher | None:
    """`slurmstepd`, the parent of the process `task` that it started; this one or one above."""
    line, child = [], os.getpid()
    while child != task:
        child = _parent(child)
        if child < 1:
            return None
        line.append(child)
    line.append(_parent(task))
    if line[-1] < 1:
        return None
    name = _read(line[-1], "cmdline") + _read(line[-1], "comm")
    return Launcher(tuple(line), was_gone=bool(name) and b"slurm" not in name)


def _parent(process: int) -> int:
    """The parent's id; 0 where there is none, or none that this process can see."""
    if process == os.getpid():
        return os.getppid()
    # The command's name, in parentheses, may hold anything.
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _was_given(process: int, variable: str) -> bool:
    """Return True if `variable` was in the environment that `process` was started with."""
    return f"\0{variable}=".encode() in b"\0" + _read(process, "environ")


def _is_python(process: int) -> bool | None:
    """Return whether it is a Python interpreter; None: this process may not know."""
    try:
        return "python" in os.path.basename(os.readlink(_PROC / str(process) / "exe"))
    except OSError:
        return None


def _read(process: int, name: str) -> bytes:
    """A file of `/proc`; empty where the process has ended or is another user's."""
    try:
        return (_PROC / str(process) / name).read_bytes()
    except OSError:
        return b""
