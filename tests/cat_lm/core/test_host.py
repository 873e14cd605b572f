"""Memory: what the host and control groups leave a process, and keeping what tensors free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cat_lm.core import host


def group(folder: Path, limit: object, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def left(root: Path, line: str) -> int | None:
    (root / "own").write_text(f"{line}\n")
    return host.group_memory(root, root / "own")


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        (1000, 900, "anon 1\ninactive_file 200\nactive_file 100\n", 400),
        (1000, 900, "", 100),
        ("max", 900, "", None),
        (500, 900, "", 0),
    ],
)
def test_limit_of_a_group_leaves_what_is_not_used(tmp_path, limit, used, stat, expected):
    group(tmp_path, limit, used, stat)
    assert left(tmp_path, "0::/") == expected


def test_tightest_of_nested_groups_counts(tmp_path):
    """A step inside a job, as SLURM makes them: the root has no limit, the job or the step has."""
    job, step = tmp_path / "slurm/job_1", tmp_path / "slurm/job_1/step_0/task_0"
    group(tmp_path, "max", 9_000)
    group(job, 8_000, 1_000)
    group(step, "max", 500)
    assert left(tmp_path, "0::/slurm/job_1/step_0/task_0") == 7_000
    group(step, 2_000, 500)
    assert left(tmp_path, "0::/slurm/job_1/step_0/task_0") == 1_500
    assert left(tmp_path, "0::/slurm") is None, "others' limits are not ours"
    assert left(tmp_path, "3:cpu,cpuset:/slurm/job_1") is None


def test_limits_of_version_1_count_too(tmp_path):
    """As on clusters whose systems are some years old."""
    job = tmp_path / "memory/slurm/job_1"
    job.mkdir(parents=True)
    (job / "memory.stat").write_text("inactive_file 200\n")
    (job / "memory.usage_in_bytes").write_text("900\n")
    for limit, expected in (("1000", 300), (str(2**63 - 4096), None)):
        (job / "memory.limit_in_bytes").write_text(limit + "\n")
        assert left(tmp_path, "4:cpu,memory:/slurm/job_1") == expected


def test_least_of_host_and_groups_is_available(monkeypatch):
    assert host.available_memory() > 0
    monkeypatch.setattr(host, "_host_memory", lambda: 70)
    for groups, expected in ((50, 50), (90, 70), (None, 70)):
        monkeypatch.setattr(host, "group_memory", lambda groups=groups: groups)
        assert host.available_memory() == expected


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


def counted(**environment: str) -> tuple[bool, int, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    result = subprocess.run(
        [sys.executable, "-c", COUNT],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, before, after = result.stdout.split()
    return kept == "True", int(before), int(after)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_tensors_take_the_memory_of_those_before_them():
    kept, before, after = counted()
    assert kept and after < PAGES / 100 < before
    kept, _, _ = counted(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept, "the environment decides"
