"""How `pytest -n` spreads the tests over worker processes; tests/conftest.py holds the hooks.

A worker gets whole files, so that what a file's tests share is made once, and the longest come
first. A whole folder are the tests on the SLURM cluster, which share the cluster and mostly wait,
and those on the GPU.
"""

from __future__ import annotations

import os

import pytest

WHOLE_FOLDERS = ("tests/slurm/", "tests/gpu/")
# Pieces of work that take long, the longest first; all others come after them.
LONGEST = (
    "tests/slurm/",
    "tests/distributed/test_elastic.py",
    "tests/fuzz/test_fuzz.py",
    "tests/e2e/test_readme.py",
    "tests/e2e/test_train_command.py",
    "tests/unit/test_ops_triton.py",
    "tests/distributed/test_engine.py",
    "tests/distributed/test_resume.py",
    "tests/distributed/test_launcher_gone.py",
    "tests/distributed/test_checkpoint.py",
    "tests/distributed/test_checkpoint_faults.py",
    "tests/e2e/test_lowest_transformers.py",
    "tests/unit/test_model_auto.py",
    "tests/unit/test_model_decode.py",
    "tests/unit/test_ops_cpu.py",
    "tests/distributed/test_preflight.py",
    "tests/distributed/test_memory.py",
)


def piece(nodeid: str) -> str:
    """The piece of work that a test belongs to: its file or folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in WHOLE_FOLDERS if file.startswith(folder)), file)


def longest_first(items: list[pytest.Item]) -> None:
    """Brings `items` into the order in which pieces are handed out; within one nothing changes."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(piece(item.nodeid), len(LONGEST)))


def worker_count(arguments: list[str]) -> int:
    """Workers for `-n auto`: one a core, and one more as the cluster's tests wait.

    None (0) for a single file, whose tests stay together anyway.
    """
    files = {argument.partition("::")[0] for argument in arguments}
    wanted = len(os.sched_getaffinity(0)) + 1
    if all(file.endswith(".py") for file in files):
        wanted = min(wanted, len(files))
    return wanted if wanted > 1 else 0


def one_thread_each() -> None:
    """In a worker, before torch is imported: cores are shared with the other workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def scheduler(config: pytest.Config, log: object) -> object:
    """pytest-xdist's scheduler that hands out `piece`s in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    crashed: set[str] = set()

    class Pieces(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return piece(nodeid)

        def remove_node(self, node: object) -> str | None:
            """A test that ended its worker is not handed to another, which it would end too."""
            units = self.assigned_work[node].values()
            left = [test for unit in units for test, done in unit.items() if not done]
            crashed.update(left[:1])
            return super().remove_node(node)

        def _assign_work_unit(self, node: object) -> None:
            scope, unit = next(iter(self.workqueue.items()))
            unit.update({test: True for test in unit if test in crashed})
            if all(unit.values()):
                del self.workqueue[scope]
            else:
                super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # by the number of tests, which says little
    return Pieces(config, log)
