"""How the tests are spread over workers."""

from __future__ import annotations

import os
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
