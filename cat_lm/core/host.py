"""The host's memory: what this process may still take, and that it keeps what its tensors leave.

A SLURM step or a container is a control group, mostly inside of others, each with a limit of its
own; the host's free memory says nothing of them.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

GIB = 2**30  # bytes
_GROUPS = Path("/sys/fs/cgroup")
# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _MAPPED = 2**31 - 1, (2**30, 2**25)  # bytes: above them, memory is given back
_OWN_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not tell."""
    found = [left for left in (_host_memory(), group_memory()) if left is not None]
    return min(found, default=None)


def _host_memory() -> int | None:
    """Linux' own estimate for the whole host."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def group_memory(root: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the control groups of this process leave it; None where none has a limit.

    Args:
        root: where control groups are mounted, of version 2 or with version 1's `memory` in it.
        own: the process's groups.
    """
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        base = root / "memory"
        if not controllers:
            names, base = ("memory.max", "memory.current"), root
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            left += _room(folder, *names)
    return min(left, default=None)


def _room(folder: Path, limit_name: str, usage_name: str) -> list[int]:
    """Read what one group leaves, as a list of one number; empty where it has no limit."""
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = int((folder / usage_name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []
    # Unlimited is "max" or a number near 2^63.
    if limit == "max" or int(limit) > 2**60:
        return []
    return [max(0, int(limit) - usage + _cached(folder))]


def _cached(folder: Path) -> int:
    """Bytes of files, which count as used but are given up."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(found.get("inactive_file", 0)) + int(found.get("active_file", 0))


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the rest of the process.

    It gives large blocks back to the system, which clears each page again when the next tensor
    takes it: on a CPU, up to a third of a small model's step.

    Returns:
        Whether it does: not with another C library, and not where the environment has a choice of
        its own.
    """
    if any(name in os.environ for name in _OWN_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older ones take at most the second.
    maps = any(mallopt(_MMAP_THRESHOLD, most) for most in _MAPPED)
    return bool(maps and mallopt(_TRIM_THRESHOLD, _KEPT))
