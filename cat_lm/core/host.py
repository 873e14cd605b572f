"""The host's memory: what this process may still take, and keeping what tensors free.

A SLURM step or a container is a control group inside of others, each with a limit of its own, which
the host's free memory does not show.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

GIB = 2**30  # bytes
_GROUPS = Path("/sys/fs/cgroup")
# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _MAPPED = 2**31 - 1, (2**30, 2**25)  # bytes: above them, memory is given back
_OWN_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def available_memory() -> int | None:
    """Return the bytes that can be taken without swapping; None where unknown."""
    found = [left for left in (_host_memory(), group_memory()) if left is not None]
    return min(found, default=None)


def _host_memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable: *(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def group_memory(root: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes that this process's control groups leave it; None where none has a limit.

    `root` is where groups of version 2 are mounted, or version 1's `memory`; `own` lists ours.
    """
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        left += [_left(at, *names) for at in (group, *group.parents) if at.is_relative_to(base)]
    return min((number for number in left if number is not None), default=None)


def _left(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = int((folder / usage_name).read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    # Unlimited is "max" or a number near 2^63.
    if limit == "max" or int(limit) > 2**60:
        return None
    # Files that are cached count as used but are given up.
    cached = re.findall(r"^(?:in)?active_file (\d+)$", statistics, re.MULTILINE)
    return max(0, int(limit) - usage + sum(map(int, cached)))


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the rest of the process. Return True if it does.

    It gives large blocks back to the system, which clears each page again when the next tensor
    takes it: on a CPU, up to a third of a small model's step. Not with another C library, and not
    where the environment has a choice of its own.
    """
    if any(name in os.environ for name in _OWN_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older ones take at most the second.
    maps = any(mallopt(_MMAP_THRESHOLD, most) for most in _MAPPED)
    return bool(maps and mallopt(_TRIM_THRESHOLD, _KEPT))
