"""Tasks of a check in worker processes: their results in order, and what ends them."""

import errno
import functools
import os
import time

import pytest

from cat_lm.core.errors import UserError
from data_prep.check import integrity


def late(number: int) -> int:
    time.sleep(0.3 if number == 0 else 0)
    return number * number


def unreadable(number: int) -> int:
    raise PermissionError(errno.EACCES, "Permission denied", "shard.bin")


def wrong(number: int) -> int:
    raise UserError("shard.idx: is damaged")


def deadly(number: int) -> int:
    os.kill(os.getpid(), 9)


def results(task, workers=2):
    tasks = [functools.partial(task, number) for number in range(5)]
    return list(integrity.in_processes(tasks, [integrity.SMALL_BYTES] * 5, workers))


def test_results_come_in_the_order_of_the_tasks():
    assert results(late) == results(late, workers=1) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize(
    ("task", "kind", "said"),
    [
        (unreadable, PermissionError, "Permission denied: 'shard.bin'"),
        (wrong, UserError, "shard.idx: is damaged"),
        (deadly, UserError, r"a worker process died \(exit code -9\).*fewer --workers"),
    ],
)
def test_errors_come_as_they_are(task, kind, said):
    with pytest.raises(kind, match=said):
        results(task)
