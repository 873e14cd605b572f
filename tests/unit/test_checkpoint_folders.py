"""What is taken for a checkpoint, what is passed over, and what is never deleted: no training."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from cat_lm.config.sections import CheckpointSection
from cat_lm.core.errors import TemporaryError, UserError, file_error
from cat_lm.training.checkpoint import (
    complete_checkpoints,
    files,
    find_checkpoint,
    is_complete,
    read_run_config,
    read_run_state,
)
from cat_lm.training.checkpoint.files import describe_left, prune, set_aside_later
from cat_lm.training.checkpoint.optimizer_state import restore_random_states
from cat_lm.training.preflight.facts import saved_checkpoints
from tests.checkpoints import (
    STATE,
    flip,
    names,
    run_of_three,
    step_folder,
    to_resume,
)


@pytest.fixture
def run(tmp_path) -> Path:
    return run_of_three(tmp_path / "run")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What is done to which file, and what is said of it.
DAMAGES = {
    "weights": ("model/model.safetensors", flip, "its checksum differs"),
    "moments": ("state/rank-00000.safetensors", flip, "its checksum differs"),
    "generators": ("random-00000.pt", flip, "its checksum differs"),
    "state": ("state.json", flip, "its checksum differs"),
    "cut": ("state/rank-00000.safetensors", cut, "bytes instead of"),
    "missing": ("random-00000.pt", Path.unlink, "no such file"),
    "a folder": ("random-00000.pt", as_folder, "is no file"),
    "a pipe": ("random-00000.pt", as_pipe, "is no file"),
    "marker": ("complete.json", Path.unlink, "no such file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_whole_one_is_taken_with_a_line_for_each_passed_over(run, kind, capsys):
    name, change, said = DAMAGES[kind]
    newest = run / "checkpoints/step-00000006"
    change(newest / name)
    assert find_checkpoint(run).name == "step-00000004"
    assert find_checkpoint(run / "checkpoints").name == "step-00000004"
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"{newest}: passed over: {name}: ") and said in line
    for path in (newest, newest / "../step-00000006"):
        with pytest.raises(UserError, match="is not a complete checkpoint: ") as raised:
            find_checkpoint(path)
        assert said in str(raised.value)
    start, lines = to_resume(run)
    assert start.name == "step-00000004"
    assert lines[0].startswith(f"{newest}: passed over: {name}: ") and said in lines[0]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_whose_only_checkpoint_is_damaged_stops(tmp_path, kind, monkeypatch):
    name, change, said = DAMAGES[kind]
    folder = step_folder(tmp_path / "run", 2)
    change(folder / name)
    before = sorted(folder.rglob("*"))
    for _ in range(2):  # the second attempt of a launcher must not start anew either
        with pytest.raises(UserError) as raised:
            to_resume(tmp_path / "run")
        line = str(raised.value)
        assert said in line and name in line and "another train.output_dir" in line
        assert len(line.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


def test_several_damaged_ones_stop_a_run_too(run):
    for step in (2, 4, 6):
        flip(run / f"checkpoints/step-{step:08d}/model/model.safetensors")
    with pytest.raises(UserError, match="none of 3 is whole; the newest, step-00000006: model"):
        to_resume(run)
    assert names(run) == [f"step-{step:08d}" for step in (2, 4, 6)]


def test_auto_starts_anew_where_there_is_nothing(tmp_path):
    assert to_resume(tmp_path / "run") == (None, [])


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"files": {}}', '{"files": 3}'])
def test_folders_without_a_marker_of_ours_are_set_aside_by_a_new_start(tmp_path, content):
    run = tmp_path / "run"
    folder = step_folder(run, 2)
    (folder / "complete.json").unlink()
    if content is not None:
        (folder / "complete.json").write_text(content)
    assert complete_checkpoints(run / "checkpoints") == []
    files = sorted(path.name for path in folder.rglob("*"))
    start, lines = to_resume(run, "never")
    assert start is None and names(run) == ["step-00000002.aside"]
    assert "set aside as step-00000002.aside" in lines[0]
    assert sorted(p.name for p in (run / "checkpoints/step-00000002.aside").rglob("*")) == files


def test_a_foreign_step_folder_and_its_notes_stay(run):
    notes = run / "checkpoints/step-00000777/notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(UserError, match="already holds step-00000006"):
        to_resume(run, "never")
    assert notes.exists()
    start, lines = to_resume(run)
    assert start.name == "step-00000006" and "passed over: complete.json: no such file" in lines[0]


def test_a_checkpoint_of_a_damaged_file_is_no_reason_to_start_anew(run):
    """Its marker is ours: train.resume=never must not train over it."""
    flip(run / "checkpoints/step-00000006/model/model.safetensors")
    with pytest.raises(UserError, match="already holds step-00000006"):
        to_resume(run, "never")


@pytest.mark.parametrize("step", [2, 6, 8])
def test_a_start_from_another_run_is_refused_where_there_are_checkpoints(run, tmp_path, step):
    """Earlier, equal or later: pruning would delete those of this folder as the start's past."""
    start, before = step_folder(tmp_path / "other", step), names(run)
    for path in (start, tmp_path / "other"):
        with pytest.raises(
            UserError, match=r"already holds step-00000006; .*another train\.output_"
        ):
            to_resume(run, str(path))
    assert names(run) == before


def test_a_start_from_another_run_sets_aside_what_is_no_checkpoint(run, tmp_path):
    start = step_folder(tmp_path / "other", 8)
    for step in (2, 4, 6):
        (run / f"checkpoints/step-{step:08d}/complete.json").unlink()
    assert to_resume(run, str(start))[0] == start
    assert to_resume(tmp_path / "new", str(start))[0] == start


def test_the_newest_of_the_run_s_own_can_be_named_by_any_path(run, tmp_path, monkeypatch):
    newest, link = run / "checkpoints/step-00000006", tmp_path / "links/step-00000006"
    link.parent.mkdir()
    link.symlink_to(newest)
    (tmp_path / "linked").symlink_to(run)
    monkeypatch.chdir(run / "checkpoints")
    for path in (newest, run, link, tmp_path / "linked", Path("step-00000006")):
        assert to_resume(run, str(path))[0].resolve() == newest
    with pytest.raises(UserError, match="already holds step-00000006"):
        to_resume(run, str(newest.with_name("step-00000004")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["files"].pop("state.json"), "lists no state.json"),
        (lambda m: m.update(files={}), "lists no state.json"),
        (lambda m: m["files"].update({"../x": m["files"]["state.json"]}), "must be a path inside"),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["state.json"]}), "path inside"),
        (lambda m: m["files"]["state.json"].update(checksum="0"), "checksum"),
        (lambda m: m["files"]["state.json"].pop("checksum"), "has no files.state.json.checksum"),
        (lambda m: m["files"]["state.json"].update(bytes="8"), "valid integer"),
        (lambda m: m.update(algorithm="md5"), "algorithm"),
        (lambda m: m.update(program="other"), "program"),
        (lambda m: m.pop("format"), "complete.json: has no format, must be 1: another version"),
        (lambda m: m.update(format=2), "complete.json: format is 2, must be 1"),
    ],
)
def test_markers_that_mean_nothing(run, change, said):
    newest = run / "checkpoints/step-00000006"
    marker = json.loads((newest / "complete.json").read_text())
    change(marker)
    (newest / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(UserError, match=r"complete\.json") as raised:
        find_checkpoint(newest)
    assert said in str(raised.value)


@pytest.mark.parametrize("path", ["", "absent", "run/checkpoints/step-00000099"])
def test_paths_without_a_checkpoint(run, path, monkeypatch):
    monkeypatch.chdir(run.parent)
    with pytest.raises(UserError, match=r"no such checkpoint|is no path"):
        find_checkpoint(path)


def test_a_checkpoint_with_files_that_its_marker_does_not_list_is_not_pruned(run):
    lines, folder = [], run / "checkpoints"
    notes = folder / "step-00000002/notes/mine.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    prune(folder, CheckpointSection(keep_last=1), folder / "step-00000006", lines.append)
    assert names(run) == ["step-00000002", "step-00000006"] and notes.read_text() == "mine"
    said = "step-00000002: holds notes/mine.txt, which its marker does not list; it stays"
    assert len(lines) == 1 and lines[0].endswith(said) and is_complete(notes.parents[1])


def test_pruning_follows_no_links(run, tmp_path):
    folder, elsewhere = run / "checkpoints", tmp_path / "elsewhere"
    shutil.move(folder / "step-00000002", elsewhere)
    (folder / "step-00000002").symlink_to(elsewhere)
    prune(folder, CheckpointSection(keep_last=1), folder / "step-00000006", print)
    assert (elsewhere / "complete.json").exists()
    assert names(run) == ["step-00000002", "step-00000006"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "has no format, must be 1: another version of cat_lm wrote it"),
        ('{"format": 1}', "has no step"),
        ("[]", "should be an object"),
        ("{", "is not JSON"),
        (json.dumps(STATE | {"step": "2"}), 'step is "2": should be a valid integer'),
        (json.dumps(STATE | {"data": None}), "data is null"),
        (json.dumps(STATE | {"world_size": 0}), "world_size is 0"),
    ],
)
def test_a_state_of_another_shape_is_one_line(tmp_path, text, said):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"state\.json: ") as raised:
        read_run_state(tmp_path)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("garbage: [", "not valid YAML"),
        ("a: 1", "has no model|a is 1"),
        ("[]", "should be an object"),
        ("model: 2020-99-99", "not valid YAML: month"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_configuration_of_another_shape_is_one_line(tmp_path, text, said):
    path = tmp_path / "run_config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
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
        (saved([1]), "cannot be read"),
        (saved({"cpu": torch.zeros(3, dtype=torch.uint8)}), "cannot be read"),
        (saved({"cpu": Path}), "cannot be read"),
    ],
)
def test_generator_states_that_are_none(tmp_path, write, said):
    path = tmp_path / "random-00000.pt"
    before = torch.get_rng_state()
    write(path)
    with pytest.raises(UserError, match=r"random-00000\.pt: ") as raised:
        restore_random_states(path)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("place", ["complete.json", "model/config.json"])
def test_a_file_system_s_bad_moment_is_no_damage(run, monkeypatch, code, place):
    """The newest checkpoint is neither passed over nor renamed: the same command goes on later."""
    real, file = open, run / "checkpoints/step-00000006" / place

    def stale(path, *args, **kwargs):
        if str(path) == str(file):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **kwargs)

    before = names(run)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", stale)
        with pytest.raises(TemporaryError, match=f"{place}: cannot be read now .* goes on$"):
            to_resume(run)
        with pytest.raises(UserError, match=f"{place}: cannot be read now"):
            find_checkpoint(run)
    assert names(run) == before
    assert to_resume(run)[0].name == "step-00000006"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_marker_that_cannot_be_read_now_is_no_reason_to_start_anew(
    run, tmp_path, monkeypatch, code
):
    """Neither from nothing nor from another run: its checkpoints would be trained over."""
    real, newest = open, run / "checkpoints/step-00000006"
    other, before = step_folder(tmp_path / "other", 8), names(run)

    def failing(path, *args, **kwargs):
        if str(path) == str(newest / "complete.json"):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", failing)
        for resume in ("never", str(other)):
            with pytest.raises(TemporaryError, match=r"complete\.json: cannot be read now"):
                to_resume(run, resume)
    assert names(run) == before


@pytest.mark.parametrize("place", ["complete.json", "random-00000.pt"])
def test_an_old_checkpoint_that_cannot_be_looked_at_ends_no_run(run, monkeypatch, place):
    """After a good save, and at a start: it stays, and is not known to be complete."""
    folder, current = run / "checkpoints", run / "checkpoints/step-00000006"
    bad = folder / "step-00000002" / place

    def refusing(real):
        def stale(path, *args, **kwargs):
            if str(path) == str(bad):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(bad))
            return real(path, *args, **kwargs)

        return stale

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refusing(os.stat))
        patch.setattr("builtins.open", refusing(open))
        assert not is_complete(bad.parent)
        prune(folder, CheckpointSection(keep_last=1), current, print)
        assert saved_checkpoints(run, 2) == 1
        assert "of 1 in" in describe_left(folder)
    assert names(run) == ["step-00000002", "step-00000006"]
    prune(folder, CheckpointSection(keep_last=1), current, print)
    assert names(run) == ["step-00000006"]


def test_checkpoints_that_have_their_room_are_counted_as_far_as_they_are_kept(run):
    assert [saved_checkpoints(run, most) for most in (1, 2, 3, 5)] == [1, 2, 3, 3]


def test_pruning_looks_at_no_checkpoint_that_stays_in_any_case(run, monkeypatch):
    """Those of many ranks have thousands of files, and all ranks wait."""
    looked, real, folder = [], files.is_complete, run / "checkpoints"
    monkeypatch.setattr(files, "is_complete", lambda path: looked.append(path.name) or real(path))
    current = folder / "step-00000006"
    prune(folder, CheckpointSection(keep_last=1, keep_every_steps=2), current, print)
    assert looked == ["step-00000006"] and len(names(run)) == 3
    (folder / "step-00000006/complete.json").unlink()  # the newest whole one stays then
    prune(folder, CheckpointSection(keep_last=1), current, print)
    assert names(run) == ["step-00000004", "step-00000006"]


def test_a_marker_whose_reading_breaks_off_is_no_damage(run, monkeypatch):
    def broken(path, schema):
        raise file_error(f"{path}: breaks off", OSError(errno.EIO, "x"))

    before = names(run)
    with monkeypatch.context() as patch:
        patch.setattr(files, "read_json", broken)
        for look in (to_resume, find_checkpoint):
            with pytest.raises(TemporaryError, match=r"complete\.json: breaks off"):
                look(run)
    assert names(run) == before and to_resume(run)[0].name == "step-00000006"


def test_links_of_the_run_s_own_names_change_nothing_elsewhere(run, tmp_path):
    (tmp_path / "mine").write_text("mine")
    folder = run / "checkpoints"
    (folder / "latest").symlink_to(tmp_path / "mine")
    flip(folder / "step-00000006/state.json")
    found, _ = to_resume(run)
    set_aside_later(folder, found, lambda line: None)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (folder / "latest").read_text() == "step-00000004\n"
