"""Where output can go, temporary folders, and deletion of what is provably ours."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from cat_lm.core import folders, outputs
from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.folders import atomic_folder, check_output


def test_place_where_no_folder_can_be_raises_user_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path, tmp_path / "a" / "b", "a"):
        check_output(out)
    for out, said in (
        ("", "is no path"),
        (" ", "is no path"),
        ("s3://bucket/x", "is an address"),
        ("file", "--out file: is a file"),
        (tmp_path / "file" / "a" / "b", f"b: {tmp_path / 'file'} is a file"),
        (tmp_path / "link" / "a", f"a: {tmp_path / 'link'} is a file"),
    ):
        with pytest.raises(UserError, match=said):
            check_output(out)
    # Root may write everywhere, so that the answer is given for it.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(UserError, match=f"--out a/b: {tmp_path} may not be written to"):
        check_output("a/b")


def test_only_listed_files_are_removed(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / "model").mkdir(parents=True)
    outside.mkdir()
    (outside / "thesis").write_text("kept")
    for name in ("a", "model/b", "notes"):
        (folder / name).write_text(name)
    (folder / "linked").symlink_to(outside)
    names = ["a", "model/b", "model/gone", "linked/thesis", "../outside/thesis", str(outside)]
    outputs.remove_files(folder, names)
    assert sorted(path.name for path in folder.iterdir()) == ["linked", "notes"]
    outputs.remove_files(folder, ["linked"])
    assert not (folder / "linked").is_symlink() and (outside / "thesis").read_text() == "kept"


def of_process(folder: Path, process: int) -> Path:
    """Return the name that another process's temporary folder of the kind has."""
    return folder.with_name(folder.name.replace(f"-{os.getpid()}.", f"-{process}."))


@pytest.fixture
def ended() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_temporary_folder_is_ours_only(tmp_path):
    folder = tmp_path / "work"
    folders.make_temporary(folder)
    (folder / "part").write_text("x")
    folders.make_temporary(folder)  # what a kill left is taken up
    assert folders.is_marked(folder) and (folder / "part").exists()
    folders.empty_temporary(folder)
    assert os.listdir(folder) == [folders.MARK]
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").write_text("kept")
    for foreign in (tmp_path / "link", tmp_path / "mine"):
        for action in (folders.make_temporary, folders.remove_temporary):
            with pytest.raises(UserError, match="was not made by this program; move it away"):
                action(foreign)
    assert (tmp_path / "mine/thesis").exists() and folder.exists()
    folders.remove_temporary(folder)
    folder.mkdir()  # a kill came between the making and the mark
    folders.remove_temporary(folder)
    assert not folder.exists()


@pytest.mark.parametrize(("number", "passes"), [(errno.ESTALE, True), (errno.EACCES, False)])
def test_folder_that_cannot_be_removed_raises_user_error(number, passes, tmp_path):
    folders.make_temporary(tmp_path / "a")
    (tmp_path / "a/part").mkdir()
    failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    with mock.patch("shutil.rmtree", failing), pytest.raises(UserError) as caught:
        folders.remove_temporary(tmp_path / "a")
    assert is_temporary(caught.value) == passes


def test_only_an_ended_process_of_this_host_is_gone(tmp_path, ended):
    mine = folders.temporary_name(tmp_path / "out", "tmp")
    gone = of_process(mine, ended)
    assert mine.parent == tmp_path and not folders.has_owner_ended(mine)
    assert folders.has_owner_ended(gone)
    elsewhere = gone.with_name(gone.name.replace(socket.gethostname().replace(".", "_"), "n001"))
    assert not folders.has_owner_ended(elsewhere)
    siblings = tmp_path / ".out.v2.n001-1-2.tmp"  # of another command, on out.v2
    for folder in (mine, gone, elsewhere, siblings):
        folders.make_temporary(folder)
    (tmp_path / ".out.mine-2.tmp").mkdir()
    (tmp_path / ".out.mine-2.tmp/thesis").touch()
    assert set(folders.list_leftovers(tmp_path / "out", "tmp")) == {mine, gone, elsewhere}


def listing(folder):
    file = folder / "record"
    return [*file.read_text().split(), "record"] if file.exists() else []


def write(out, **files):
    with atomic_folder(out, listing) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "record").write_text(" ".join(files))


@pytest.fixture
def out(tmp_path) -> Path:
    """A folder with a result of ours, alone in another one."""
    write(tmp_path / "model", weights="1")
    return tmp_path / "model"


def check_holds(out: Path, weights: str) -> None:
    assert (out / "weights").read_text() == weights and os.listdir(out.parent) == ["model"]


@pytest.mark.parametrize("name", ["notes", "results/mine", "mine/deep/"])
def test_folder_is_replaced_only_where_its_record_lists_all(out, name):
    out.chmod(0o2770)
    write(out, weights="2", extra="2")
    write(out, weights="3")
    assert sorted(os.listdir(out)) == ["record", "weights"]
    assert out.stat().st_mode & 0o7777 == 0o2770
    if name.endswith("/"):
        (out / name).mkdir(parents=True)
    else:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).symlink_to("nowhere")
    with pytest.raises(UserError, match=f"holds {name}, which is not of an earlier result; move"):
        write(out, weights="4")
    assert os.path.lexists(out / name)
    check_holds(out, "3")


def test_file_that_comes_into_a_folder_meanwhile_is_kept(out):
    with pytest.raises(UserError, match="holds notes, which"), atomic_folder(out, listing) as new:
        (new / "weights").write_text("2")
        (out / "notes").write_text("kept")
    assert (out / "notes").read_text() == "kept"
    check_holds(out, "1")


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1])
def test_error_amid_a_replacement_loses_nothing(out, monkeypatch, at, error):
    """After the first renaming the earlier result is back, after the second the new one is there"""
    real, calls = os.replace, iter(range(10))

    def replace(source, target):
        real(source, target)
        if out in (source, target) and next(calls) == at:
            raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((KeyboardInterrupt, UserError)):
        write(out, weights="2")
    check_holds(out, ("1", "2")[at])


def test_kill_between_the_renames_loses_nothing(out, ended):
    left = of_process(folders.temporary_name(out, "tmp"), ended)
    folders.make_temporary(left)
    out.rename(left / "old")
    with pytest.raises(ZeroDivisionError), atomic_folder(out, listing):
        raise ZeroDivisionError
    check_holds(out, "1")


@pytest.mark.parametrize("files", [(), ("note.txt",)])
def test_earlier_result_is_kept_where_its_place_was_made_again(out, files):
    """A command on another host was killed between the renames; then somebody made the folder."""
    left = out.with_name(".model.n001-4026531836-7.tmp")
    folders.make_temporary(left)
    out.rename(left / "old")
    out.mkdir()
    for name in files:
        (out / name).write_text("mine")
    with pytest.raises((UserError, ZeroDivisionError)) as error, atomic_folder(out, listing):
        raise ZeroDivisionError
    assert not files or "holds note.txt, which is not of an earlier result" in str(error.value)
    kept = left / "old" if files else out
    assert (kept / "weights").read_text() == "1" and left.exists() == bool(files)


def test_two_writers_lose_no_result(out, monkeypatch):
    with atomic_folder(out, listing), pytest.raises(UserError, match="another command is writing"):
        write(out, weights="0")
    # And where the file system has no locks:
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    write(out, weights="1")
    with atomic_folder(out, listing) as first:
        monkeypatch.setattr(os, "getpid", lambda: os.getppid())
        write(out, weights="2")
        (first / "weights").write_text("3")
        (first / "record").write_text("weights")
    check_holds(out, "3")
