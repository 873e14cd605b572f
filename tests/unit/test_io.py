"""Typed readers, and deletion of what is provably ours."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import subprocess
from unittest import mock

import pytest
from pydantic import Field

from cat_lm.core import cli, folders, outputs, readers
from cat_lm.core.errors import UserError
from cat_lm.core.files import checksums
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.core.numbers import Range


class Example(readers.Record):
    count: int
    path: readers.InsideName = "a"
    names: list[str] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 5000, "is not JSON"),
        (b"[]", "holds []: should be an object"),
        (b"{}", "has no count"),
        (b'{"count": "1"}', 'count is "1": should be a valid integer'),
        (b'{"count": true}', "count is true: should be a valid integer"),
        (b'{"count": 1, "names": ["x", null]}', "names.1 is null: should be a valid string"),
        (b'{"count": 1, "path": "../x"}', 'path is "../x": must be a path inside'),
        (b'{"count": 1, "path": "/x"}', 'path is "/x": must be a path inside'),
        (b'{"count": 1, "path": "a/../../x"}', "must be a path inside"),
        (b'{"count": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_json_of_another_shape_is_one_line(text, said, tmp_path):
    file = tmp_path / "example.json"
    file.write_bytes(text)
    with pytest.raises(UserError) as raised:
        readers.read_json(file, Example, "make it again")
    line = str(raised.value)
    assert line.startswith(f"{file}: {said}") or said in line
    assert "\n" not in line and line.endswith("; make it again")


def test_json_of_a_later_version_keeps_its_keys_to_itself(tmp_path):
    file = tmp_path / "example.json"
    file.write_text('{"count": 3, "path": "model/config.json", "later": 1}')
    assert readers.read_json(file, Example).count == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!python/object:os.x 1", "tag"),
        ("a: !!int abc", "not valid YAML"),
        ("a: !!bool x", "not valid YAML"),
        ("a: !!timestamp abc", "not valid YAML"),
        ("a: 2020-99-99", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: " + "[" * 400, "not valid YAML"),
        ("1: 2", "line 1: key '1' is no text; put it in quotes"),
        ("a: 1\na: 2", "line 2: key 'a' stands twice"),
        ("a: b: c", "not valid YAML"),
        ("a: \x01", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_read_is_one_line(text, said, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        readers.read_yaml(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_key_of_a_merged_yaml_object_may_be_replaced():
    read = readers.parse_yaml("a: &x {k: 1, m: 2}\nb: {<<: *x, k: 3}\nc: *x", "F")
    assert read == {"a": {"k": 1, "m": 2}, "b": {"k": 3, "m": 2}, "c": {"k": 1, "m": 2}}


def test_what_a_path_may_lead_to(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for path, said in (
        (tmp_path / "none", "no such file or folder"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "binary" / "x", "a part of the path is a file"),
        (tmp_path / "binary", r"is not UTF-8 text \(byte 2\)"),
    ):
        with pytest.raises(UserError, match=said):
            readers.read_text(path)
    with pytest.raises(UserError, match="null byte"):
        readers.read_text("a\0b")
    with pytest.raises(UserError, match="larger than 0 MiB"):
        readers.read_text(tmp_path / "binary", limit=2)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UserError, match=r"site file .*binary: no permission"):
        readers.read_text(tmp_path / "binary", "site file")


def test_outputs_that_cannot_be(tmp_path):
    for out, said in (
        ("", "is no path"),
        ("s3://bucket/x", "is an address"),
        (" ", "is no path"),
    ):
        with pytest.raises(UserError, match=said):
            check_output(out)


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
    assert (outside / "thesis").read_text() == "kept"
    outputs.remove_files(folder, ["linked"])
    assert not (folder / "linked").is_symlink() and (outside / "thesis").exists()


def test_a_temporary_folder_is_ours_alone(tmp_path):
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
    folders.remove_temporary(folder)
    assert not folder.exists()
    folder.mkdir()  # a kill came between the making and the mark
    folders.remove_temporary(folder)
    assert not folder.exists()


def test_only_a_process_of_this_host_that_has_ended_is_gone(tmp_path):
    mine = folders.own_name(tmp_path / "out", "tmp")
    assert mine.parent == tmp_path and not folders.maker_is_gone(mine)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = mine.with_name(mine.name.replace(f"-{os.getpid()}.", f"-{ended.pid}."))
    assert folders.maker_is_gone(gone)
    elsewhere = gone.with_name(gone.name.replace(socket.gethostname().replace(".", "_"), "n001"))
    assert not folders.maker_is_gone(elsewhere)
    siblings = tmp_path / ".out.v2.n001-1-2.tmp"  # of another command, on out.v2
    for folder in (mine, gone, elsewhere, siblings, tmp_path / ".out.notes-1.tmp"):
        folders.make_temporary(folder)
    (tmp_path / ".out.mine-2.tmp").mkdir()
    (tmp_path / ".out.mine-2.tmp/thesis").touch()
    found = folders.left_beside(tmp_path / "out", "tmp")
    assert set(found) == {mine, gone, elsewhere, tmp_path / ".out.notes-1.tmp"}


def listing(folder):
    file = folder / "record"
    return [*file.read_text().split(), "record"] if file.exists() else []


def write(out, **files):
    with atomic_folder(out, listing) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "record").write_text(" ".join(files))


@pytest.mark.parametrize("name", ["notes", "results/mine", "link", "mine/deep/"])
def test_a_folder_is_replaced_only_where_its_record_lists_all(tmp_path, name):
    out = tmp_path / "model"
    write(out, weights="1", extra="1")
    write(out, weights="2")
    assert sorted(os.listdir(out)) == ["record", "weights"] and os.listdir(tmp_path) == ["model"]
    if name.endswith("/"):
        (out / name).mkdir(parents=True)
    else:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).symlink_to("nowhere")
    with pytest.raises(UserError, match=f"holds {name}, which is not of an earlier result; move"):
        write(out, weights="3")
    assert (out / "weights").read_text() == "2" and os.path.lexists(out / name)
    assert os.listdir(tmp_path) == ["model"]


def test_what_comes_into_a_folder_meanwhile_is_kept(tmp_path):
    out = tmp_path / "model"
    write(out, weights="1")
    with pytest.raises(UserError, match="holds notes, which"), atomic_folder(out, listing) as new:
        (new / "weights").write_text("2")
        (out / "notes").write_text("kept")
    assert (out / "notes").read_text() == "kept" and (out / "weights").read_text() == "1"
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1])
def test_an_error_amid_a_replacement_loses_nothing(tmp_path, monkeypatch, at, error):
    """After the first renaming the earlier result is back, after the second the new one is there"""
    out, real, calls = tmp_path / "model", os.replace, iter(range(10))
    write(out, weights="1")

    def replace(source, target):
        real(source, target)
        if out in (source, target) and next(calls) == at:
            raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((KeyboardInterrupt, UserError)):
        write(out, weights="2")
    assert (out / "weights").read_text() == ("1", "2")[at] and os.listdir(tmp_path) == ["model"]


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    out = tmp_path / "model"
    write(out, weights="1")
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = folders.own_name(out, "tmp")
    left = mine.with_name(mine.name.replace(f"-{os.getpid()}.", f"-{ended.pid}."))
    folders.make_temporary(left)
    out.rename(left / "old")
    with pytest.raises(ZeroDivisionError), atomic_folder(out, listing):
        raise ZeroDivisionError
    assert (out / "weights").read_text() == "1" and os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("files", [(), ("note.txt",)])
def test_an_earlier_result_is_kept_where_its_place_was_made_again(tmp_path, files):
    """A command on another host was killed between the renames; then somebody made the folder."""
    out = tmp_path / "model"
    write(out, weights="1")
    left = tmp_path / ".model.n001-4026531836-7.tmp"
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


def test_two_writers_lose_no_result(tmp_path, monkeypatch):
    out = tmp_path / "model"
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
    assert (out / "weights").read_text() == "3" and os.listdir(tmp_path) == ["model"]


def test_hard_links_keep_their_permissions(tmp_path):
    source = tmp_path / "source"
    source.write_text("data")
    source.chmod(0o440)
    with atomic_folder(tmp_path / "out") as folder:
        os.link(source, folder / "linked")
    assert source.stat().st_mode & 0o777 == 0o440


def test_replacing_keeps_permissions(tmp_path):
    out = tmp_path / "model"
    write(out, weights="1")
    out.chmod(0o2770)
    write(out, weights="2")
    assert out.stat().st_mode & 0o7777 == 0o2770


def test_checksums_of_many_files(tmp_path):
    import hashlib

    import xxhash

    files = [tmp_path / str(size) for size in (0, 1, 5 << 20)]
    for file in files:
        file.write_bytes(os.urandom(int(file.name)))
    for algorithm, make in (("sha256", hashlib.sha256), ("xxh3_128", xxhash.xxh3_128)):
        seen = []
        found = checksums(files, algorithm, seen.append)
        assert found == {file: make(file.read_bytes()).hexdigest() for file in files}
        # Told of each piece, so that a huge file is no silence.
        assert seen.count(files[1]) == 1 and seen.count(files[2]) > 1
    assert checksums([], "sha256") == {}


@pytest.mark.parametrize(
    "text", ["", " ", "x", "1e30", "nan", "0.5", "9" * 5000, "true", "0x10", "٣", "-1", "11"]
)
def test_arguments_outside_of_their_range(text):
    for kind in (cli.whole(Range(0, 10)), cli.whole_numbers(Range(0, 10), "1,2")):
        with pytest.raises(argparse.ArgumentTypeError) as raised:
            kind(text)
        assert len(str(raised.value)) < 160


def test_arguments_within_their_range():
    assert cli.whole(Range(0, 10_000))("1_000") == 1000
    assert cli.whole_numbers(Range(1, 512), "1,2")("256,512") == (256, 512)
    assert cli.number(Range(0, 1))("1e-3") == 1e-3
    for text in ("inf", "nan", "-0.1", "1.1", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.number(Range(0, 1))(text)
    with pytest.raises(argparse.ArgumentTypeError, match="must be greater than 0"):
        cli.number(Range(0, 1), above=0)("0")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_know(number, tmp_path):
    (tmp_path / "lines").write_text(f'{{"step": 1}}\n{{"loss": {number}}}\n')
    with pytest.raises(UserError, match=r"lines, line 2: is not JSON .* is no number of JSON"):
        readers.read_json_lines(tmp_path / "lines", lambda *_: None)
