"""Tiers of tests, and how they are spread over workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import workers
from tests.conftest import REPOSITORY


def test_whole_folders_are_there():
    assert all((REPOSITORY / name).is_dir() for name in workers.WHOLE_FOLDERS)
    assert all(seconds > 0 for seconds in workers.known_durations().values())


def test_longest_come_first_and_each_piece_stays_in_its_order():
    ids = ["tests/unit/test_b.py::one", "tests/e2e/test_readme.py::two[a::b]"]
    ids += ["tests/slurm/test_faults.py::last", "tests/unit/test_b.py::again"]
    ids += ["tests/slurm/test_cluster.py::after_it", "tests/unit/test_new.py::x"]
    items = [SimpleNamespace(nodeid=name) for name in ids]
    seconds = {ids[0]: 3.0, ids[3]: 4.0, ids[1]: 6.0, ids[4]: 100.0, "tests/unit/gone.py::x": 9.0}
    workers.longest_first(items, seconds)
    assert [ids.index(item.nodeid) for item in items] == [2, 4, 0, 3, 1, 5]


def test_workers_for_auto(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    a, b = "tests/unit/test_a.py", "tests/unit/test_b.py"
    for arguments, count in ((["tests"], 5), ([f"{a}::x", f"{a}::y"], 0), ([a, b], 2)):
        assert workers.worker_count(arguments) == count


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small suite with this project's hooks and a durations file of its own."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tests").mkdir()
    for name in ("conftest.py", "workers.py"):
        (folder / "tests" / name).write_text((REPOSITORY / "tests" / name).read_text())
    (folder / "tests/__init__.py").touch()
    (folder / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    long: x\n    nightly: x\n")
    (folder / "tests/test_a.py").write_text(
        "import time, pytest\n\n@pytest.mark.long\ndef test_long(): time.sleep(0.6)\n\n"
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.nightly)])\n"
        "def test_short(x): pass\n"
    )
    (folder / "tests/test_b.py").write_text("def test_b(): pass\n")
    return folder


def test_a_test_that_ends_its_worker_is_run_once(suite):
    (suite / "crash").mkdir()
    (suite / "crash/test_end.py").write_text(
        "import os\ndef test_ends(): os._exit(3)\ndef test_after(): pass\n"
    )
    (suite / "tests/durations.json").write_text("{}")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "crash", "tests"],
        cwd=suite,
        env=environment | {"PYTHONPATH": str(suite)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    shutil.rmtree(suite / "crash")
    assert "crashed while running 'crash/test_end.py::test_ends'" in done.stdout
    assert "1 failed, 3 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ("", "2 passed, 2 deselected"),
        ("--all -n 2", "3 passed"),
        ("--nightly", "4 passed"),
        ("tests/test_a.py::test_long", "1 passed"),  # what is named is run
        ("--all --write-durations tests/test_a.py -n 2", "2 passed"),
    ],
)
def test_tiers_are_run_when_asked_for(arguments, counts, suite):
    durations = suite / "tests/durations.json"
    durations.write_text('{"tests/gone.py::x": 3, "tests/test_b.py::b": 7}')
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments.split()],
        cwd=suite,
        env=environment | {"PYTHONPATH": str(suite)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts in done.stdout
    if "--write" in arguments:  # of the files that ran; those of a file that is gone go
        found = json.loads(durations.read_text())
        assert found.keys() == {"tests/test_a.py::test_long", "tests/test_b.py::b"}
        assert found["tests/test_a.py::test_long"] >= 0.6 and found["tests/test_b.py::b"] == 7
