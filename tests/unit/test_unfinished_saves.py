"""Saves and prunes that a killed process has not finished: removed, where they are ours."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import pytest

from cat_lm.config.sections import CheckpointSection
from cat_lm.core import temporary
from cat_lm.core.errors import TemporaryError, UserError
from cat_lm.core.temporary import MARK, make_temporary
from cat_lm.training.checkpoint import transfer
from cat_lm.training.checkpoint.files import clear_leftovers, prune
from tests.checkpoints import names, run_of_three, to_resume

STEPS = {f"step-{step:08d}" for step in (2, 4, 6)}


@pytest.fixture
def run(tmp_path) -> Path:
    return run_of_three(tmp_path / "run")


def leftover(run: Path, name: str) -> Path:
    folder = run / "checkpoints" / name
    make_temporary(folder)
    (folder / "step").mkdir()
    (folder / "step/half").write_text("half")
    return folder


def test_what_a_kill_left_goes_and_what_only_looks_like_it_stays(run):
    folder, lines = run / "checkpoints", []
    gone = [leftover(run, f".step-0000000{n}.{end}") for n, end in ((7, "saving"), (2, "deleting"))]
    (folder / ".step-00000010.saving").mkdir()  # killed before the mark
    kept = {".step-00000008.saving", ".step-00000009.deleting", ".step-notes"}
    for name in kept:
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    clear_leftovers(folder, lines.append)
    assert not any(path.exists() for path in gone) and set(names(run)) == STEPS | kept
    assert all((folder / name / "notes.txt").read_text() == "mine" for name in kept)
    assert len(lines) == 2 and all("not made by this program" in line for line in lines)
    with pytest.raises(UserError, match=r"step-00000008\.saving: stands where temporary files go"):
        transfer.prepare(folder / ".step-00000008.saving/step-00000008")


def test_without_locks_nothing_is_cleared(run):
    """Another process may train in the folder, on any host, and be saving at this moment."""
    path = leftover(run, ".step-00000007.saving")
    no_locks = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "not implemented"))
    with no_locks:
        start, lines = to_resume(run)
    assert start.name == "step-00000006" and (path / "step/half").exists() and len(lines) == 1
    assert lines[0].startswith(f"warning: {run / 'checkpoints'}: no locks here (not implemented)")
    assert to_resume(run)[0].name == "step-00000006" and not path.exists()


def test_a_leftover_that_cannot_be_looked_at_now_stays(run, monkeypatch):
    path, lines = leftover(run, ".step-00000007.saving"), []
    stale = TemporaryError(f"{path / MARK}: Stale file handle")
    with monkeypatch.context() as patch:
        patch.setattr(temporary, "read_json", mock.Mock(side_effect=stale))
        clear_leftovers(run / "checkpoints", lines.append)
        with pytest.raises(TemporaryError, match="Stale file handle"):
            transfer.prepare(path / "step-00000007")
    assert (path / "step/half").exists() and len(lines) == 1 and lines[0].endswith("; it stays")


def test_a_save_begins_empty(run):
    new = leftover(run, ".step-00000008.saving") / "step-00000008"
    transfer.prepare(new)
    assert sorted(path.name for path in new.parent.iterdir()) == [MARK, new.name]
    assert sorted(path.name for path in new.iterdir()) == ["model", "state"]


def test_a_prune_that_cannot_delete_says_so_and_is_continued(run, monkeypatch):
    folder, lines = run / "checkpoints", []
    with monkeypatch.context() as patch:
        failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        patch.setattr("shutil.rmtree", failing)
        prune(folder, CheckpointSection(keep_last=2), folder / "step-00000006", lines.append)
    assert names(run) == [".step-00000002.deleting", "step-00000004", "step-00000006"]
    assert len(lines) == 1 and "step-00000002: cannot be deleted" in lines[0]
    clear_leftovers(folder, lines.append)
    assert names(run) == ["step-00000004", "step-00000006"] and len(lines) == 1
