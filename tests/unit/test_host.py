"""Memory that a process may take: the host's, and what its control groups leave of it."""

from __future__ import annotations

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
