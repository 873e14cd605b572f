"""Locks: who holds what, when it ends, and what a file system without locks means."""

import errno
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.folders import Busy, take_lock
from eval.common.interrupts import lock_folder
from eval.lab import execution
from eval.lab.run import run_study
from eval.lab.study import StudyOptions
from eval.studies import STUDIES


@pytest.fixture
def place(tmp_path):
    return tmp_path / "place"


def test_lock_has_one_holder(place):
    with take_lock(place):
        with pytest.raises(Busy):
            take_lock(place, wait=False)
        with pytest.raises(Busy):
            take_lock(place, shared=True, wait=False)
    take_lock(place, wait=False).close()


def test_shared_holders_keep_out_a_single_one(place):
    first, second = take_lock(place, shared=True), take_lock(place, shared=True, wait=False)
    for lock in (first, second):
        assert lock.readable() and lock.writable()  # NFS asks for one of them, by the kind
        with pytest.raises(Busy):
            take_lock(place, wait=False)
        lock.close()
    take_lock(place, wait=False).close()


def test_next_holder_waits_until_the_lock_ends(place):
    first, taken = take_lock(place), []
    thread = threading.Thread(target=lambda: taken.append(take_lock(place)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not taken
    first.close()
    first.close()  # more than once changes nothing
    thread.join(20)
    with pytest.raises(Busy):
        take_lock(place, wait=False)
    taken[0].close()


def test_lock_ends_with_its_process_and_those_that_inherited_it(place):
    lock = take_lock(place)
    code = "input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]
    )
    lock.close()
    with pytest.raises(Busy):
        take_lock(place, wait=False)
    child.communicate(b"\n")
    take_lock(place, wait=False).close()


def test_removed_file_is_no_lock(tmp_path):
    """Whoever opened a file before it was removed would else hold it beside one who made it anew"""
    path = tmp_path / "lock"
    real = os.path.samestat

    def removed_meanwhile(*stats):
        with mock.patch("os.path.samestat", real):
            path.unlink()
            path.touch()
            return real(os.stat(path), stats[0])

    with mock.patch("os.path.samestat", removed_meanwhile), pytest.raises(Busy):
        take_lock(path, wait=False)
    answers = [removed_meanwhile, real]
    with mock.patch("os.path.samestat", lambda *stats: answers.pop(0)(*stats)):
        lock = take_lock(path)
    assert not answers
    with lock, pytest.raises(Busy):
        take_lock(path, wait=False)


def test_file_system_without_locks_holds_nobody_back(place):
    error = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("fcntl.flock", side_effect=error):
        locks = [take_lock(place, wait=False) for _ in range(2)]
    assert [lock.error for lock in locks] == [error] * 2
    with take_lock(place) as lock:
        assert lock.error is None


def test_study_that_runs_has_its_folder_alone(tmp_path, monkeypatch):
    def run(how):
        return run_study(STUDIES.get("accuracy"), StudyOptions("smoke"), tmp_path, how)

    started = []
    monkeypatch.setattr(execution, "_estimate", lambda *_: None)
    monkeypatch.setattr(execution, "execute", lambda *_: started.append(1))
    with lock_folder(tmp_path):
        with pytest.raises(UserError, match="another call of the study works in it"):
            run(execution.Execution())
        assert run(execution.Execution(estimate_only=True)) is None
        assert not started and [path.name for path in tmp_path.iterdir()] == [".lock"]
    monkeypatch.setattr(execution, "execute", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):  # alone it would train, and lets go when it ends
        run(execution.Execution())
    take_lock(tmp_path / ".lock", wait=False).close()
