"""How the tests are spread over workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import workers

REPOSITORY = Path(__file__).parents[2]


def test_whole_folders_and_the_files_of_durations_are_there():
    for name in workers.WHOLE_FOLDERS:
        assert (REPOSITORY / name).is_dir(), name
    seconds = workers.known_durations()
    assert len(seconds) > 10 and all(value > 0 for value in seconds.values())
    # A file that moves takes its durations along with the next `--write-durations`.
    there = [name for name in seconds if (REPOSITORY / name.partition("::")[0]).exists()]
    assert len(there) > len(seconds) / 2


def test_the_longest_come_first_and_each_piece_stays_in_its_order():
    ids = ["tests/unit/test_b.py::one", "tests/e2e/test_readme.py::two[a::b]"]
    ids += ["tests/slurm/test_faults.py::last", "tests/unit/test_b.py::again"]
    ids += ["tests/slurm/test_cluster.py::after_it", "tests/unit/test_new.py::x"]
    items = [SimpleNamespace(nodeid=name) for name in ids]
    seconds = {ids[0]: 3.0, ids[3]: 4.0, ids[1]: 6.0, ids[4]: 100.0, "tests/unit/gone.py::x": 9.0}
    workers.longest_first(items, seconds)
    assert [ids.index(item.nodeid) for item in items] == [2, 4, 0, 3, 1, 5]
    assert [workers.piece(name) for name in ids[:3]] == [
        *("tests/unit/test_b.py", "tests/e2e/test_readme.py", "tests/slurm/")
    ]


def suite(folder: Path) -> Path:
    """A small suite with this project's hooks and a durations file of its own."""
    (folder / "tests").mkdir()
    for name in ("conftest.py", "workers.py"):
        (folder / "tests" / name).write_text((REPOSITORY / "tests" / name).read_text())
    (folder / "tests/__init__.py").touch()
    (folder / "tests/durations.json").write_text('{"tests/gone.py::x": 3, "tests/test_b.py::b": 7}')
    (folder / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    long: takes long\n")
    (folder / "tests/test_a.py").write_text(
        "import time, pytest\n\n@pytest.mark.long\ndef test_long(): time.sleep(0.6)\n\n"
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.long)])\n"
        "def test_short(x): pass\n"
    )
    (folder / "tests/test_b.py").write_text("def test_b(): pass\n")
    return folder


def run_suite(folder: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ((), "2 passed, 2 deselected"),
        (("-n", "2"), "2 passed"),
        (("--all",), "4 passed"),
        (("--all", "-n", "2"), "4 passed"),
        # What is named is run.
        (("tests/test_a.py::test_long",), "1 passed"),
        (("tests/test_a.py",), "1 passed, 2 deselected"),
    ],
)
def test_the_long_tier_is_run_when_asked_for(arguments, counts, tmp_path):
    assert counts in run_suite(suite(tmp_path), *arguments)


@pytest.mark.parametrize("spread", [(), ("-n", "2")])
def test_durations_are_written(spread, tmp_path):
    """Of the files that ran; those of a file that did not stay, those of one that is gone go."""
    suite(tmp_path)
    run_suite(tmp_path, "--all", "--write-durations", "tests/test_a.py", *spread)
    found = json.loads((tmp_path / "tests/durations.json").read_text())
    assert found.keys() == {"tests/test_a.py::test_long", "tests/test_b.py::b"}
    assert found["tests/test_a.py::test_long"] >= 0.6 and found["tests/test_b.py::b"] == 7


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


@pytest.mark.parametrize("ending", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
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
