"""What is taken for a checkpoint, what is passed over, and what is never deleted: no training."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.config.sections import CheckpointSection
from cat_lm.core.errors import TemporaryError, UserError, file_error
from cat_lm.core.folders import make_temporary, temporary_name
from cat_lm.training.checkpoint import (
    complete_checkpoints,
    files,
    find_checkpoint,
    is_complete,
    read_run_config,
    read_run_state,
)
from cat_lm.training.checkpoint.files import (
    clear_leftovers,
    describe_left,
    prune,
    set_aside_later,
)
from cat_lm.training.checkpoint.optimizer_state import restore_random_states
from cat_lm.training.preflight.facts import saved_checkpoints
from tests.checkpoints import (
    STATE,
    find_checkpoint_to_resume,
    flip,
    names,
    run_of_three,
    step_folder,
)
from tests.damages import damages

STEPS = ["step-00000002", "step-00000004", "step-00000006"]
KEEP_ONE, KEEP_TWO = CheckpointSection(keep_last=1), CheckpointSection(keep_last=2)


@pytest.fixture
def run(tmp_path) -> Path:
    return run_of_three(tmp_path / "run")


@pytest.fixture
def folder(run) -> Path:
    return run / "checkpoints"


@pytest.fixture
def newest(folder) -> Path:
    return folder / STEPS[-1]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What is done to which file, and what is said of it.
DAMAGES = {
    "weights": ("model/model.safetensors", flip, "its checksum differs"),
    "state": ("state.json", flip, "its checksum differs"),
    "cut": ("state/rank-00000.safetensors", cut, "bytes instead of"),
    "missing": ("random-00000.pt", Path.unlink, "no such file"),
    "a pipe": ("random-00000.pt", as_pipe, "is no file"),
    "marker": ("complete.json", Path.unlink, "no such file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_newest_whole_checkpoint_is_taken(run, newest, kind, capsys):
    """With a line for each that is passed over."""
    name, change, said = DAMAGES[kind]
    change(newest / name)
    for path in (run, newest.parent):
        assert find_checkpoint(path).name == "step-00000004"
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"{newest}: passed over: {name}: ") and said in line
    with pytest.raises(UserError, match="is not a complete checkpoint: ") as raised:
        find_checkpoint(newest)
    assert said in str(raised.value)
    start, lines = find_checkpoint_to_resume(run)
    assert start.name == "step-00000004"
    assert lines[0].startswith(f"{newest}: passed over: {name}: ") and said in lines[0]


NAMES = ("complete.json", "state.json", "run_config.yaml", "random-*", "model/*.json")


@pytest.fixture(scope="module")
def newest_files(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """The folder of three checkpoints, and the files of the newest."""
    folder = run_of_three(tmp_path_factory.mktemp("saved") / "run") / "checkpoints"
    paths = [path for path in (folder / STEPS[-1]).rglob("*") if path.is_file()]
    return folder, {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@given(data=st.data())
def test_any_damage_of_the_newest_checkpoint_is_noticed(newest_files, data):
    """All bytes have a checksum; only the marker that lists them may be written otherwise."""
    folder, entries = newest_files
    damage = data.draw(damages(entries, [f"{STEPS[-1]}/{name}" for name in NAMES], folder))
    damage.apply(folder)
    said = []
    found = find_checkpoint(folder, said.append)
    damage.undo(folder, entries[damage.name])
    if found.name == STEPS[-1]:
        assert damage.name == f"{STEPS[-1]}/complete.json" and not said
    else:
        assert found.name == STEPS[-2] and "\n" not in said[0] and "passed over" in said[0]


@pytest.mark.parametrize("kind", DAMAGES)
def test_run_whose_only_checkpoint_is_damaged_stops(tmp_path, kind):
    name, change, said = DAMAGES[kind]
    only = step_folder(tmp_path / "run", 2)
    change(only / name)
    before = sorted(only.rglob("*"))
    for _ in range(2):  # the second attempt of a launcher must not start from scratch either
        with pytest.raises(UserError) as raised:
            find_checkpoint_to_resume(tmp_path / "run")
        line = str(raised.value)
        assert said in line and name in line and "another train.output_dir" in line
        assert "\n" not in line
    assert sorted(only.rglob("*")) == before


def test_run_of_several_damaged_checkpoints_stops(run, folder):
    for step in STEPS:
        flip(folder / step / "model/model.safetensors")
    with pytest.raises(UserError, match="none of 3 is whole; the newest, step-00000006: model"):
        find_checkpoint_to_resume(run)
    assert names(run) == STEPS
    with pytest.raises(UserError, match="already holds step-00000006"):
        find_checkpoint_to_resume(run, "never")  # its marker is ours: it is not trained over


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"files": {}}', '{"files": 3}'])
def test_folder_without_a_marker_of_ours_is_set_aside(tmp_path, content):
    run = tmp_path / "run"
    assert find_checkpoint_to_resume(run) == (None, [])
    marker = step_folder(run, 2) / "complete.json"
    marker.unlink()
    if content is not None:
        marker.write_text(content)
    assert complete_checkpoints(run / "checkpoints") == []
    found = sorted(path.name for path in marker.parent.rglob("*"))
    start, lines = find_checkpoint_to_resume(run, "never")
    assert start is None and names(run) == ["step-00000002.aside"]
    assert "set aside as step-00000002.aside" in lines[0]
    assert sorted(p.name for p in (run / "checkpoints/step-00000002.aside").rglob("*")) == found


def test_step_folder_of_somebody_else_stays(run, folder):
    notes = folder / "step-00000777/notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(UserError, match="already holds step-00000006"):
        find_checkpoint_to_resume(run, "never")
    assert notes.exists()
    start, lines = find_checkpoint_to_resume(run)
    assert start.name == "step-00000006" and "passed over: complete.json: no such file" in lines[0]


@pytest.mark.parametrize("step", [2, 6, 8])
def test_start_from_another_run_is_refused_where_there_are_checkpoints(run, tmp_path, step):
    """Earlier, equal or later: pruning would delete those of this folder as the start's past."""
    start = step_folder(tmp_path / "other", step)
    for path in (start, tmp_path / "other"):
        with pytest.raises(UserError, match=r"already holds step-00000006; .*another train\.outp"):
            find_checkpoint_to_resume(run, str(path))
    assert names(run) == STEPS
    for marker in run.glob("checkpoints/*/complete.json"):
        marker.unlink()
    assert find_checkpoint_to_resume(run, str(start))[0] == start


def test_newest_of_the_runs_own_can_be_named_by_any_path(run, newest, tmp_path, monkeypatch):
    link = tmp_path / "links/step-00000006"
    link.parent.mkdir()
    link.symlink_to(newest)
    (tmp_path / "linked").symlink_to(run)
    monkeypatch.chdir(newest.parent)
    for path in (newest, run, link, tmp_path / "linked", Path("step-00000006")):
        assert find_checkpoint_to_resume(run, str(path))[0].resolve() == newest
    with pytest.raises(UserError, match="already holds step-00000006"):
        find_checkpoint_to_resume(run, str(newest.with_name("step-00000004")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["files"].pop("state.json"), "lists no state.json"),
        (lambda m: m["files"].update({"../x": m["files"]["state.json"]}), "must be a path inside"),
        (lambda m: m["files"]["state.json"].update(checksum="0"), "checksum"),
        (lambda m: m["files"]["state.json"].pop("checksum"), "has no files.state.json.checksum"),
        (lambda m: m.update(program="other"), "program"),
        (lambda m: m.pop("format"), "complete.json: has no format, must be 1: another version"),
    ],
)
def test_marker_of_another_shape_raises_user_error(newest, change, said):
    marker = json.loads((newest / "complete.json").read_text())
    change(marker)
    (newest / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(UserError, match=r"complete\.json") as raised:
        find_checkpoint(newest)
    assert said in str(raised.value)


@pytest.mark.parametrize("path", ["", "absent", "run/checkpoints/step-00000099"])
def test_path_without_a_checkpoint_raises_user_error(run, path, monkeypatch):
    monkeypatch.chdir(run.parent)
    with pytest.raises(UserError, match=r"no such checkpoint|is no path"):
        find_checkpoint(path)


def test_pruning_keeps_unlisted_files_and_follows_no_links(run, folder, newest, tmp_path):
    notes, lines = folder / "step-00000002/notes/mine.txt", []
    notes.parent.mkdir()
    notes.write_text("mine")
    shutil.move(folder / "step-00000004", tmp_path / "elsewhere")
    (folder / "step-00000004").symlink_to(tmp_path / "elsewhere")
    prune(folder, KEEP_ONE, newest, lines.append)
    assert names(run) == STEPS and notes.read_text() == "mine" and is_complete(notes.parents[1])
    said = "step-00000002: holds notes/mine.txt, which its marker does not list; it stays"
    assert len(lines) == 1 and lines[0].endswith(said)
    assert (tmp_path / "elsewhere/complete.json").exists()


def test_pruning_looks_at_no_checkpoint_that_stays_in_any_case(run, folder, newest, monkeypatch):
    """Those of many ranks have thousands of files, and all ranks wait."""
    looked, real = [], files.is_complete
    monkeypatch.setattr(files, "is_complete", lambda path: looked.append(path.name) or real(path))
    prune(folder, CheckpointSection(keep_last=1, keep_every_steps=2), newest, print)
    assert looked == ["step-00000006"] and names(run) == STEPS
    (newest / "complete.json").unlink()  # the newest whole one stays then
    prune(folder, KEEP_ONE, newest, print)
    assert names(run) == STEPS[1:]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "has no format, must be 1: another version of cat_lm wrote it"),
        ("{", "is not JSON"),
        (json.dumps(STATE | {"step": "2"}), 'step is "2": should be a valid integer'),
        (json.dumps(STATE | {"world_size": 0}), "world_size is 0"),
    ],
)
def test_state_of_another_shape_raises_user_error(tmp_path, text, said):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"state\.json: ") as raised:
        read_run_state(tmp_path)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"), [("a: 1", "has no model|a is 1"), ("model: 2020-99-99", "not valid YAML")]
)
def test_configuration_of_another_shape_raises_user_error(tmp_path, text, said):
    path = tmp_path / "run_config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        read_run_config(tmp_path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def saved(value):
    return lambda path: torch.save(value, path)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b"abc"), "cannot be read"),
        (saved({"cpu": torch.zeros(3, dtype=torch.uint8)}), "cannot be read"),
        (saved({"cpu": Path}), "cannot be read"),
    ],
)
def test_generator_states_that_are_none_raise_user_error(tmp_path, write, said):
    path = tmp_path / "random-00000.pt"
    before = torch.get_rng_state()
    write(path)
    with pytest.raises(UserError, match=r"random-00000\.pt: ") as raised:
        restore_random_states(path)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert torch.get_rng_state().equal(before)


def failing(bad: Path, code: int):
    """Have a file neither opened nor looked at, inside."""
    patch = pytest.MonkeyPatch()

    def refusing(real):
        def refuse(path, *given, **named):
            if str(path) == str(bad):
                raise OSError(code, os.strerror(code), str(bad))
            return real(path, *given, **named)

        return refuse

    patch.setattr(os, "stat", refusing(os.stat))
    patch.setattr("builtins.open", refusing(open))
    return patch


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("place", ["complete.json", "model/config.json"])
def test_file_that_cannot_be_read_now_is_no_damage(run, newest, tmp_path, code, place):
    """The newest checkpoint is neither passed over, renamed nor trained over."""
    looks = [(find_checkpoint_to_resume, "auto")]
    if place == "complete.json":
        looks += [
            (find_checkpoint_to_resume, "never"),
            (find_checkpoint_to_resume, str(step_folder(tmp_path / "other", 8))),
        ]
    patch = failing(newest / place, code)
    try:
        for look, resume in looks:
            with pytest.raises(TemporaryError, match=f"{place}: cannot be read now .* goes on$"):
                look(run, resume)
        with pytest.raises(UserError, match=f"{place}: cannot be read now"):
            find_checkpoint(run)
    finally:
        patch.undo()
    assert names(run) == STEPS and find_checkpoint_to_resume(run)[0] == newest


def test_marker_whose_reading_breaks_off_is_no_damage(run, newest, monkeypatch):
    def broken(path, schema):
        raise file_error(f"{path}: breaks off", OSError(errno.EIO, "x"))

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_json", broken)
        for look in (find_checkpoint_to_resume, find_checkpoint):
            with pytest.raises(TemporaryError, match=r"complete\.json: breaks off"):
                look(run)
    assert names(run) == STEPS and find_checkpoint_to_resume(run)[0] == newest


@pytest.mark.parametrize("place", ["complete.json", "random-00000.pt"])
def test_old_checkpoint_that_cannot_be_looked_at_ends_no_run(run, folder, newest, place):
    """After a good save, and at a start: it stays, and is not known to be complete."""
    bad = folder / "step-00000002" / place
    assert [saved_checkpoints(run, most) for most in (1, 2, 3, 5)] == [1, 2, 3, 3]
    patch = failing(bad, errno.ESTALE)
    try:
        assert not is_complete(bad.parent)
        prune(folder, KEEP_ONE, newest, print)
        assert saved_checkpoints(run, 2) == 1
        assert "of 1 in" in describe_left(folder)
    finally:
        patch.undo()
    assert names(run) == ["step-00000002", "step-00000006"]
    prune(folder, KEEP_ONE, newest, print)
    assert names(run) == ["step-00000006"]


def test_link_named_latest_changes_nothing_elsewhere(run, folder, newest, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (folder / "latest").symlink_to(tmp_path / "mine")
    flip(newest / "state.json")
    set_aside_later(folder, find_checkpoint_to_resume(run)[0], lambda line: None)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (folder / "latest").read_text() == "step-00000004\n"


# Saves and prunes that a killed process has not finished


def leftover(folder: Path, step: int, suffix: str, process: int | None = None) -> Path:
    """Make what a killed process left; by default what this one did."""
    made = temporary_name(folder / f"step-{step:08d}", suffix)
    made = made.with_name(made.name.replace(f"-{os.getpid()}.", f"-{process or os.getpid()}."))
    make_temporary(made)
    (made / "step").mkdir()
    (made / "step/half").write_text("half")
    return made


def test_leftovers_of_a_kill_go_and_what_looks_like_them_stays(run, folder):
    lines, gone = [], [leftover(folder, 7, "saving"), leftover(folder, 2, "deleting")]
    temporary_name(folder / "step-00000010", "saving").mkdir()  # killed before the mark
    kept = {".step-00000008.n-1.saving", ".step-00000009.n-1.deleting", ".step-notes"}
    for name in kept:
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    clear_leftovers(folder, lines.append, alone=True)
    assert not any(path.exists() for path in gone) and set(names(run)) == {*STEPS, *kept}
    assert all((folder / name / "notes.txt").read_text() == "mine" for name in kept)
    assert len(lines) == 2 and all("not made by this program" in line for line in lines)


def test_leftovers_of_a_live_process_stay_where_there_are_no_locks(run, folder):
    """Another process may train in the folder, on any host, and be saving at this moment."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (leftover(folder, 7, "saving", p) for p in (ended.pid, os.getppid()))
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "not implemented")):
        start, lines = find_checkpoint_to_resume(run)
    assert start.name == "step-00000006" and not dead.exists() and len(lines) == 1
    assert (alive / "step/half").exists()
    assert lines[0].startswith(f"warning: {folder}: no locks here (not implemented)")
    assert find_checkpoint_to_resume(run)[0].name == "step-00000006" and not alive.exists()


def test_prune_that_cannot_delete_says_so_and_is_continued(run, folder, newest, monkeypatch):
    lines = []
    with monkeypatch.context() as patch:
        refused = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        patch.setattr("shutil.rmtree", refused)
        prune(folder, KEEP_TWO, newest, lines.append)
    doomed = temporary_name(folder / "step-00000002", "deleting").name
    assert names(run) == [doomed, *STEPS[1:]]
    assert len(lines) == 1 and "step-00000002: cannot be deleted" in lines[0]
    clear_leftovers(folder, lines.append, alone=True)
    assert names(run) == STEPS[1:] and len(lines) == 1
