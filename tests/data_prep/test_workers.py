"""Tasks in worker processes: their results, their progress, and what ends them."""

import errno
import os

import pytest

from cat_lm.core.errors import UserError
from data_prep.common.workers import run_tasks


def square(number, report):
    report(number)
    return number * number


def unreadable(number, report):
    raise PermissionError(errno.EACCES, "Permission denied", "shard.bin")


def wrong(number, report):
    raise UserError("shard.idx: is damaged")


def deadly(number, report):
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_and_progress_of_all_tasks_come(workers):
    done = []
    assert sorted(run_tasks(square, range(5), workers, done.append)) == [0, 1, 4, 9, 16]
    assert sum(done) == 10


@pytest.mark.parametrize(
    ("task", "kind", "said"),
    [
        (unreadable, PermissionError, "Permission denied: 'shard.bin'"),
        (wrong, UserError, "shard.idx: is damaged"),
        (deadly, UserError, r"a worker process died, .*fewer --workers"),
    ],
)
def test_errors_come_as_they_are(task, kind, said):
    with pytest.raises(kind, match=said):
        list(run_tasks(task, range(5), 2, lambda done: None))


def test_tasks_are_taken_when_a_worker_is_free():
    taken = []
    tasks = (taken.append(number) or number for number in range(9))
    results = run_tasks(square, tasks, 2, lambda done: None)
    next(results)
    assert len(taken) <= 4
    results.close()
