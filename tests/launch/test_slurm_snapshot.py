"""The copy of the code that a run is submitted with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cat_lm.core.errors import UserError
from launch.slurm import snapshot
from launch.slurm.folder import RunFolder
from tests.launch.places import copied


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "cat_lm" / "__pycache__").mkdir(parents=True)
    (folder / "cat_lm" / "a.py").write_text("1\n")
    (folder / "cat_lm" / "__pycache__" / "a.pyc").write_text("x")
    (folder / "train.py").write_text("train\n")
    (folder / ".gitignore").write_text("__pycache__/\n/data/\n")
    (folder / "data").mkdir()
    (folder / "data" / "big").write_text("data")
    return folder


def committed(project: Path) -> Path:
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "x")
    return project


def test_snapshot_of_a_clean_checkout(project, tmp_path):
    folder = RunFolder(tmp_path / "run")
    record = snapshot.save_code(folder, committed(project))
    assert copied(folder) == {".gitignore", "cat_lm/a.py", "train.py"}
    assert (record["dirty"], record["untracked"], len(record["commit"])) == (False, [], 40)
    assert folder.code_diff.read_text() == ""
    assert json.loads(folder.code_record.read_text()) == record


def test_snapshot_of_a_dirty_checkout(project, tmp_path):
    """Modified, added, staged and removed files; the diff brings the commit to the copy."""
    committed(project)
    (project / "train.py").write_text("changed ü\n")
    (project / "cat_lm" / "näw.py").write_text("new\n")
    (project / "cat_lm" / "a.py").unlink()
    # What nobody added to git may be a secret, unless it is code.
    (project / ".env").write_text("PASSWORD=1\n")
    (project / "id_rsa").write_text("key\n")
    (project / "cat_lm" / ".netrc").write_text("password\n")
    folder = RunFolder(tmp_path / "run")
    record = snapshot.save_code(folder, project)
    assert copied(folder) == {".gitignore", "train.py", "cat_lm/näw.py"}
    assert (folder.code / "train.py").read_text() == "changed ü\n"
    assert (record["dirty"], record["untracked"]) == (True, ["cat_lm/näw.py"])
    assert "+changed ü" in folder.code_diff.read_text()
    git(project, "add", "train.py")
    snapshot.save_code(folder, project)
    assert "+changed ü" in folder.code_diff.read_text()  # staged
    # Later edits do not reach the run, a new copy drops what is gone.
    (project / "train.py").write_text("later\n")
    assert (folder.code / "train.py").read_text() == "changed ü\n"
    (project / "cat_lm" / "näw.py").unlink()
    snapshot.save_code(folder, project)
    assert copied(folder) == {".gitignore", "train.py"}


def test_checkout_that_git_refuses_is_no_checkout_without_git(project, tmp_path):
    committed(project)
    (project / ".git/HEAD").write_text("damaged\n")
    with pytest.raises(UserError, match="git refuses to tell the commit"):
        snapshot.save_code(RunFolder(tmp_path / "run"), project)


def test_snapshot_without_git(project, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.slurm.mkdir(parents=True)
    folder.code_diff.write_text("of an earlier submission")
    record = snapshot.save_code(folder, project)
    assert copied(folder) == {"cat_lm/a.py", "train.py"}
    assert (record["commit"], record["dirty"]) == (None, None)
    assert not folder.code_diff.exists()


def test_repository_around_the_project_is_not_its_version(project, tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    assert snapshot.save_code(RunFolder(tmp_path / "run"), project)["commit"] is None


def test_run_folder_inside_the_checkout_is_not_copied_into_itself(project):
    committed(project)
    folder = RunFolder(project / "outputs" / "run")
    for _ in range(2):
        snapshot.save_code(folder, project)
        assert copied(folder) == {".gitignore", "cat_lm/a.py", "train.py"}


def test_data_in_the_checkout_is_refused(project, tmp_path, monkeypatch):
    committed(project)
    monkeypatch.setattr(snapshot, "MOST_BYTES", 1000)
    (project / "eval").mkdir(exist_ok=True)
    (project / "eval/tokens.bin").write_bytes(bytes(2000))
    with pytest.raises(UserError, match=r"largest file is eval/tokens.bin: move data out"):
        snapshot.save_code(RunFolder(tmp_path / "run"), project)
    assert not (tmp_path / "run").exists()
