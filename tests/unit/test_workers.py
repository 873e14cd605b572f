"""How the tests are spread over workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import workers

REPOSITORY = Path(__file__).parents[2]


def test_what_is_named_is_there():
    for name in (*workers.LONGEST, *workers.WHOLE_FOLDERS):
        assert (REPOSITORY / name).exists(), name


def test_the_longest_come_first_and_each_piece_stays_in_its_order():
    ids = ["tests/unit/test_b.py::one", "tests/e2e/test_readme.py::two[a::b]"]
    ids += ["tests/slurm/test_faults.py::last", "tests/unit/test_b.py::again"]
    ids += ["tests/slurm/test_cluster.py::after_it", "tests/distributed/test_elastic.py::x"]
    items = [SimpleNamespace(nodeid=name) for name in ids]
    workers.longest_first(items)
    assert [ids.index(item.nodeid) for item in items] == [2, 4, 5, 1, 0, 3]
    assert [workers.piece(name) for name in ids[:3]] == [
        *("tests/unit/test_b.py", "tests/e2e/test_readme.py", "tests/slurm/")
    ]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["tests"], 5),
        (["tests/unit/test_a.py"], 0),
        (["tests/unit/test_a.py::one", "tests/unit/test_a.py::two[x]"], 0),
        (["tests/unit/test_a.py", "tests/unit/test_b.py"], 2),
        (["tests/unit/test_a.py", "tests/e2e"], 5),
    ],
)
def test_workers_for_auto(arguments, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    assert workers.worker_count(arguments) == count


@pytest.mark.parametrize("ending", [1, 2, 3])
def test_a_test_that_ends_its_worker_fails_once_and_the_others_run(ending, tmp_path):
    """xdist alone hands it out again, until no worker is left."""
    (tmp_path / "conftest.py").write_text(
        "from tests import workers\n\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return workers.scheduler(config, log)\n"
    )
    bodies = ["os._exit(3)" if number == ending else "pass" for number in (1, 2, 3)]
    tests = [f"def test_{number}(): {body}\n" for number, body in enumerate(bodies, 1)]
    (tmp_path / "test_a.py").write_text("import os\n\n" + "".join(tests))
    (tmp_path / "test_b.py").write_text("def test_4(): pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 1 and "1 failed, 3 passed" in ran.stdout, ran.stdout
