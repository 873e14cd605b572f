"""Saves and prunes that a killed process has not finished: removed, where they are ours."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from cat_lm.config.sections import CheckpointSection
from cat_lm.core.folders import MARK, make_temporary, own_name
from cat_lm.training.checkpoint.files import clear_leftovers, prune
from cat_lm.training.checkpoint.run import prepare
from tests.checkpoints import names, run_of_three, to_resume

STEPS = {f"step-{step:08d}" for step in (2, 4, 6)}


@pytest.fixture
def run(tmp_path) -> Path:
    return run_of_three(tmp_path / "run")


def leftover(run: Path, step: int, suffix: str, pid: int | None = None) -> Path:
    folder = own_name(run / f"checkpoints/step-{step:08d}", suffix)
    folder = folder.with_name(folder.name.replace(f"-{os.getpid()}.", f"-{pid or os.getpid()}."))
    make_temporary(folder)
    (folder / "step").mkdir()
    (folder / "step/half").write_text("half")
    return folder


def test_what_a_kill_left_goes_and_what_only_looks_like_it_stays(run):
    folder, lines = run / "checkpoints", []
    gone = [leftover(run, 7, "saving"), leftover(run, 2, "deleting")]
    own_name(folder / "step-00000010", "saving").mkdir()  # killed before the mark
    kept = {".step-00000008.n-1.saving", ".step-00000009.n-1.deleting", ".step-notes"}
    for name in kept:
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    clear_leftovers(folder, lines.append, alone=True)
    assert not any(path.exists() for path in gone) and set(names(run)) == STEPS | kept
    assert all((folder / name / "notes.txt").read_text() == "mine" for name in kept)
    assert len(lines) == 2 and all("not made by this program" in line for line in lines)


def test_without_locks_only_what_a_dead_process_left_goes(run):
    """Another process may train in the folder, on any host, and be saving at this moment."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = leftover(run, 7, "saving", ended.pid), leftover(run, 8, "saving", os.getppid())
    no_locks = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "not implemented"))
    with no_locks:
        start, lines = to_resume(run)
    assert start.name == "step-00000006" and not dead.exists() and len(lines) == 1
    assert (alive / "step/half").exists()
    assert lines[0].startswith(f"warning: {run / 'checkpoints'}: no locks here (not implemented)")
    assert to_resume(run)[0].name == "step-00000006" and not alive.exists()


def test_a_save_begins_empty(run):
    new = leftover(run, 8, "saving") / "step-00000008"
    prepare(new)
    assert sorted(path.name for path in new.parent.iterdir()) == [MARK, new.name]
    assert sorted(path.name for path in new.iterdir()) == ["model", "state"]


def test_a_prune_that_cannot_delete_says_so_and_is_continued(run, monkeypatch):
    folder, lines = run / "checkpoints", []
    with monkeypatch.context() as patch:
        failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        patch.setattr("shutil.rmtree", failing)
        prune(folder, CheckpointSection(keep_last=2), folder / "step-00000006", lines.append)
    doomed = own_name(folder / "step-00000002", "deleting").name
    assert names(run) == [doomed, "step-00000004", "step-00000006"]
    assert len(lines) == 1 and "step-00000002: cannot be deleted" in lines[0]
    clear_leftovers(folder, lines.append, alone=True)
    assert names(run) == ["step-00000004", "step-00000006"] and len(lines) == 1
