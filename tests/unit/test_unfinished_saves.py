"""Saves that a killed or living process has not finished: removed, kept, or set aside."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from cat_lm.core import own_files
from cat_lm.core.errors import TemporaryError, file_error
from cat_lm.core.own_files import MARK, make_marked
from cat_lm.training.checkpoint import saving
from cat_lm.training.checkpoint.folder import PURPOSE, clear_leftovers
from tests.checkpoints import names, run_of_three, to_resume


@pytest.fixture
def run(tmp_path) -> Path:
    return run_of_three(tmp_path / "run")


def test_an_unfinished_save_goes_and_what_only_looks_like_one_is_set_aside(run):
    folder, lines = run / "checkpoints", []
    make_marked(folder / ".step-00000007.saving", PURPOSE)
    for name in (".step-00000008.saving", ".step-00000009.deleting", ".step-notes"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    clear_leftovers(folder, lines.append, alone=True)
    kept = ["step-00000008.saving.aside", "step-00000009.aside", ".step-notes"]
    assert set(names(run)) == {f"step-{step:08d}" for step in (2, 4, 6)} | set(kept)
    assert all((folder / name / "notes.txt").read_text() == "mine" for name in kept)
    assert len(lines) == 2


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def unfinished_save(run: Path, step: int, pid: int, host: str = "") -> Path:
    """What a process of that number and host is writing, or has left when it was killed."""
    folder = run / f"checkpoints/.step-{step:08d}.saving"
    make_marked(folder, PURPOSE)
    mark = json.loads((folder / MARK).read_text())
    mark["writer"] |= {"pid": pid} | ({"host": host, "job": "7"} if host else {})
    (folder / MARK).write_text(json.dumps(mark))
    (folder / "half").write_text("half")
    return folder


@pytest.mark.parametrize("locks", [True, False])
def test_without_locks_only_what_a_dead_process_of_this_host_left_is_removed(run, locks):
    """Another process may train in the folder, on any host, and be saving at this moment."""
    dead, own = ended_process(), os.getpid()
    gone = [unfinished_save(run, 7, dead), unfinished_save(run, 8, own)]
    kept = {
        unfinished_save(run, 9, os.getppid()): f"process {os.getppid()} on ",
        unfinished_save(run, 10, dead, "n001"): f"process {dead} on n001 (job 7) may still write",
        run / "checkpoints/.step-00000012.saving": "another process may still write it",
    }
    (run / "checkpoints/.step-00000012.saving").mkdir()
    no_locks = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "not implemented"))
    with contextlib.nullcontext() if locks else no_locks:
        start, lines = to_resume(run)
    assert start.name == "step-00000006" and not any(path.exists() for path in gone)
    if locks:
        assert not lines and not any(path.exists() for path in kept)
        return
    assert lines[0].startswith(f"warning: {run / 'checkpoints'}: no locks here (not implemented)")
    assert all(path.exists() for path in kept) and len(lines) == 1 + len(kept)
    for path, said in kept.items():
        assert [line for line in lines if f"{path}: {said}" in line and "stays" in line], path


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("what", ["mark", "removal"])
def test_an_unfinished_save_that_fails_for_a_while_stays(what, locks, run, monkeypatch):
    """Neither removed nor renamed: without locks its writer may live, with them its room is ours"""
    path, lines = unfinished_save(run, 7, os.getppid() if what == "mark" else os.getpid()), []
    stale = OSError(errno.ESTALE, "Stale file handle", str(path / MARK))
    read = own_files.read_json

    def fails(place, schema):
        if place == path / MARK:
            raise file_error(f"{place}: {stale.strerror}", stale)
        return read(place, schema)

    with monkeypatch.context() as patched:
        if what == "mark":
            patched.setattr(own_files, "read_json", fails)
        else:
            patched.setattr(own_files, "empty_marked", mock.Mock(side_effect=stale))
        clear_leftovers(run / "checkpoints", lines.append, alone=locks)
        assert (path / "half").exists() and len(lines) == 1 and lines[0].endswith("; it stays")
        with pytest.raises(TemporaryError, match="Stale file handle"):
            saving.prepare(path, lines.append, alone=locks)
    assert (path / "half").exists() and len(lines) == 1


def test_a_mark_that_a_kill_left_in_a_whole_checkpoint_goes_at_a_start_that_can_read_it(run):
    """One that cannot be read for a while ends no run: the checkpoint is whole with it."""
    folder, lines = run / "checkpoints/step-00000002", []
    own_files.take_over(folder, PURPOSE)
    stale = TemporaryError(f"{folder / MARK}: Stale file handle")
    with mock.patch.object(own_files, "read_json", side_effect=stale):
        clear_leftovers(run / "checkpoints", lines.append, alone=True)
    assert (folder / MARK).exists() and not lines
    clear_leftovers(run / "checkpoints", lines.append, alone=True)
    assert not (folder / MARK).exists() and not lines and len(names(run)) == 3


def test_a_save_does_not_take_another_process_s_folder(run):
    """It is set aside whole, and is not published by who made it before."""
    temporary, lines = unfinished_save(run, 8, os.getppid()), []
    with pytest.raises(OSError, match=f"process {os.getppid()} on .* saves the same step"):
        saving.publish(temporary, run / "checkpoints/step-00000008", {}, None, lines.append)
    saving.prepare(temporary, lines.append, alone=False)
    aside = run / "checkpoints/step-00000008.saving.aside"
    assert (aside / "half").read_text() == "half" and "set aside as step-00000008" in lines[0]
    assert sorted(path.name for path in temporary.iterdir()) == [MARK, "model", "state"]
    (temporary / "model/part").write_text("own")
    saving.prepare(temporary, lines.append, alone=False)  # after its own failed save
    assert not (temporary / "model/part").exists() and len(lines) == 1
