"""Memory: what the host and control groups leave a process, and keeping what tensors free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cat_lm.core import host

VERSION_2 = ("memory.max", "memory.current")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def group(folder: Path, names: tuple[str, str], limit: object, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(stat)


def left(root: Path, lines: str) -> int | None:
    own = root / "own"
    own.write_text(lines)
    return host.group_memory(root, own)


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        (1000, 900, "anon 1\ninactive_file 200\nactive_file 100\n", 400),
        (1000, 900, "", 100),
        ("max", 900, "", None),
        (2**63 - 4096, 900, "", None),
        (500, 900, "", 0),
    ],
)
@pytest.mark.parametrize(
    ("names", "folder", "line"), [(VERSION_2, ".", "0::/"), (VERSION_1, "memory", "4:memory:/")]
)
def test_the_limit_of_a_group(tmp_path, names, folder, line, limit, used, stat, expected):
    group(tmp_path / folder, names, limit, used, stat)
    assert left(tmp_path, f"{line}\n") == expected


def test_the_tightest_of_nested_groups_counts(tmp_path):
    """A step inside a job, as SLURM makes them: the root has no limit, the job or the step has."""
    job, step = tmp_path / "slurm/job_1", tmp_path / "slurm/job_1/step_0/task_0"
    group(tmp_path, VERSION_2, "max", 9_000)
    group(job, VERSION_2, 8_000, 1_000)
    group(step, VERSION_2, "max", 500)
    assert left(tmp_path, "0::/slurm/job_1/step_0/task_0\n") == 7_000
    group(step, VERSION_2, 2_000, 500)
    assert left(tmp_path, "0::/slurm/job_1/step_0/task_0\n") == 1_500
    assert left(tmp_path, "0::/slurm\n") is None, "others' limits are not ours"
    assert left(tmp_path, "3:cpu,cpuset:/slurm/job_1\n") is None


def test_the_least_of_host_and_groups(monkeypatch):
    monkeypatch.setattr(host, "_host_memory", lambda: 70)
    for groups, expected in ((50, 50), (90, 70), (None, 70)):
        monkeypatch.setattr(host, "group_memory", lambda groups=groups: groups)
        assert host.available_memory() == expected
    monkeypatch.setattr(host, "_host_memory", lambda: None)
    assert host.available_memory() is None


def test_this_host_has_some():
    assert host.available_memory() > 0


# Pages that the system had to clear for tensors of 64 MiB, one after another.
COUNT = """
import resource, torch
from cat_lm.core.host import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given = min(faults() for _ in range(5))
print(keep_freed_memory())
print(given, min(faults() for _ in range(9)))  # the first ones make room
"""
PAGES = 3 * 2**26 // os.sysconf("SC_PAGE_SIZE")


def counted(**environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", COUNT]
    result = subprocess.run(
        words, env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, before, after = result.stdout.split()
    return kept == "True", int(before), int(after)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_tensors_take_the_memory_of_those_before_them():
    kept, before, after = counted()
    assert kept
    assert after < PAGES / 100 < before


def test_the_environment_decides_where_it_says_something():
    kept, _, _ = counted(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
