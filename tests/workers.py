"""Tiers of tests, and how `pytest -n` spreads them over workers; tests/conftest.py has the hooks.

A worker gets whole files, so that what a file's tests share is made once, and the longest come
first, by tests/durations.json. A whole folder are the tests on the SLURM cluster, which share the
cluster and mostly wait, and those on the GPU.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

WHOLE_FOLDERS = ("tests/slurm/", "tests/gpu/")
TIERS = ("long", "nightly")
DURATIONS = Path(__file__).with_name("durations.json")
_WRITTEN_SECONDS = 0.5  # shorter tests are not in the file


def piece(nodeid: str) -> str:
    """Return the file or folder of a test, which one worker runs whole."""
    file = _file(nodeid)
    return next((folder for folder in WHOLE_FOLDERS if file.startswith(folder)), file)


def longest_first(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Bring `items` into the order in which pieces are handed out; within one nothing changes.

    Args:
        seconds: by node id; a piece takes what its tests that are run take.
    """
    totals: dict[str, float] = defaultdict(float)
    for item in items:
        totals[piece(item.nodeid)] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -totals[piece(item.nodeid)])


def known_durations() -> dict[str, float]:
    """Return the seconds of each test that takes long, by node id, as the file has them."""
    return json.loads(DURATIONS.read_text(encoding="utf-8"))


class Durations:
    """The seconds of a run's tests, for the file (`--write-durations`)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Replace what the file says of the files that ran; others stay while they are there."""
        ran = {_file(nodeid) for nodeid in self.seconds}
        root = DURATIONS.parents[1]
        kept = {
            nodeid: seconds
            for nodeid, seconds in known_durations().items()
            if _file(nodeid) not in ran and (root / _file(nodeid)).exists()
        }
        found = {n: round(s, 1) for n, s in self.seconds.items() if s >= _WRITTEN_SECONDS}
        text = json.dumps(kept | found, indent=0, sort_keys=True, ensure_ascii=False)
        DURATIONS.write_text(text + "\n", encoding="utf-8")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def in_tiers(
    items: list[pytest.Item], named: list[str], tiers: frozenset[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into those that are run and those that are left out.

    Args:
        named: the command line's files and tests; a test that is named is run.
        tiers: those of `TIERS` that were asked for.
    """
    tests = tuple(argument for argument in named if "::" in argument)
    chosen: tuple[list, list] = ([], [])
    for item in items:
        is_named = bool(tests) and item.nodeid.startswith(tests)
        needed = {tier for tier in TIERS if item.get_closest_marker(tier)}
        chosen[bool(needed - tiers) and not is_named].append(item)
    return chosen


def worker_count(arguments: list[str]) -> int:
    """Return the workers of `-n auto`: one a core, and one more as the cluster's tests wait.

    A single file needs none (0): its tests stay together anyway.
    """
    files = {_file(argument) for argument in arguments}
    wanted = len(os.sched_getaffinity(0)) + 1
    if all(file.endswith(".py") for file in files):
        wanted = min(wanted, len(files))
    return wanted if wanted > 1 else 0


def one_thread_each() -> None:
    """In a worker, before torch is imported: cores are shared with the other workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def scheduler(config: pytest.Config, log: object) -> object:
    """Return pytest-xdist's scheduler that hands out `piece`s in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    crashed: set[str] = set()

    class Pieces(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return piece(nodeid)

        def remove_node(self, node: object) -> str | None:
            """Keep a test that ended its worker from another one, which it would end too."""
            units = self.assigned_work[node].values()
            left = [test for unit in units for test, done in unit.items() if not done]
            crashed.update(left[:1])
            return super().remove_node(node)

        def _reschedule(self, node: object) -> None:
            for scope, unit in list(self.workqueue.items()) if crashed else ():
                unit.update({test: True for test in unit if test in crashed})
                if all(unit.values()):
                    del self.workqueue[scope]
            super()._reschedule(node)
            # A worker begins a test when it knows the next one, or that there is none.
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    config.option.loadscopereorder = False  # by the number of tests, which says little
    return Pieces(config, log)
