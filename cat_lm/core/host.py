"""Host memory: how much this process may still allocate, and glibc's reuse of freed memory.

A SLURM step or a container is a control group (cgroup) inside of others, each with its own limit,
which the host's free memory does not show.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

GIB = 2**30  # bytes
_GROUPS = Path("/sys/fs/cgroup")
# The parameters' numbers in <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _MAPPED = 2**31 - 1, (2**30, 2**25)  # bytes; more free memory is returned to the system
_OWN_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None where unknown."""
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
    """Return the bytes that this process's control groups still allow; None without a limit.

    Args:
        root: the folder where groups are mounted (version 2, or version 1 with `memory` in it).
        own: the file that lists the groups of this process.
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
    # The cache of files counts as used, although the kernel gives it up when memory is needed.
    cached = re.findall(r"^(?:in)?active_file (\d+)$", statistics, re.MULTILINE)
    return max(0, int(limit) - usage + sum(map(int, cached)))


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the rest of the process. Return True if it does.

    By default large blocks go back to the system, which clears every page again for the next
    tensor: on a CPU, that takes up to a third of a small model's step. Nothing changes with another
    C library, or where environment variables set these parameters.
    """
    if any(name in os.environ for name in _OWN_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older versions of glibc accept at most the second value.
    maps = any(mallopt(_MMAP_THRESHOLD, most) for most in _MAPPED)
    return bool(maps and mallopt(_TRIM_THRESHOLD, _KEPT))
