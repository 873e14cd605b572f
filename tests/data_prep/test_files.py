"""Which files a path stands for: folders, globs, links, hidden and excluded ones."""

import errno
import os

import pytest

from cat_lm.core.errors import TemporaryError, UserError
from data_prep.assemble import raw_bytes
from data_prep.sources.base import Part
from data_prep.sources.local import PythonStdlib
from tests.data_prep.helpers import documents, json_lines, names, opened, texts


def test_files_are_left_out_by_their_paths(tmp_path):
    for name in ("a.txt", "b.md", "sub/a.txt", "sub/deep/c.txt", "subs/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")

    def left(*exclude):
        return names(opened("files", tmp_path, exclude=exclude))

    whole = ["a.txt", "b.md", "sub/a.txt", "sub/deep/c.txt", "subs/d.txt"]
    assert left() == whole
    assert left("sub/*") == ["a.txt", "b.md", "subs/d.txt"], "* stands for / too"
    assert left("*.md", "sub?/*") == ["a.txt", "sub/a.txt", "sub/deep/c.txt"]
    assert left("[ab].*") == whole[2:], "a whole path must match"
    for pattern in ("sub", "SUB/*", "encodings/*", f"{tmp_path}/*", "x" * 999):
        with pytest.raises(UserError, match=r"^--exclude .*: matches no file; .* sub/a\.txt$"):
            left("a.txt", pattern)
    with pytest.raises(UserError, match=r"--exclude \*: leaves no file"):
        left("*")


def test_folders_behind_links_are_read_and_links_to_folders_above_end(tmp_path):
    there, root = tmp_path / "other disk", tmp_path / "mirror"
    for folder in (there / "deep", root / "chunk1"):
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_bytes(json_lines([folder.name]))
    (root / "chunk2").symlink_to(there)
    (root / "chunk1" / "up").symlink_to(root)
    (there / "deep" / "here").symlink_to(there / "deep")
    (root / "chunk1" / "b.jsonl").symlink_to(there / "deep" / "a.jsonl")
    source = opened("files", root)
    names = [part.name for part in source.parts]
    assert names == ["chunk1/a.jsonl", "chunk1/b.jsonl"]
    assert texts(root) == ["chunk1", "deep"]
    (line,) = source.notes(0.05)
    assert line.endswith("listed again (files: 1): chunk2/deep/a.jsonl is chunk1/b.jsonl")
    (root / "chunk2").unlink()
    (root / "chunk1" / "c.jsonl").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match=r"--path .*c\.jsonl is a link to nothing"):
        texts(root)


def test_links_that_lead_to_each_other_are_followed_once(tmp_path):
    """Neither folder lies above the other."""
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(json_lines([name]))
        (tmp_path / name / "other").symlink_to(f"../{other}")
    for path in (tmp_path, tmp_path / "**/*.jsonl"):
        source = opened("files", path)
        assert names(source) == ["a/other/x.jsonl", "a/x.jsonl"]
        assert source.left_out[0].names == (
            *("b/other/x.jsonl is a/x.jsonl", "b/x.jsonl is a/other/x.jsonl"),
        )


@pytest.mark.parametrize(("number", "kind"), [("ESTALE", TemporaryError), ("EACCES", UserError)])
@pytest.mark.parametrize(
    "call", ["data_prep.sources.documents.open", "data_prep.sources.base.sha256"]
)
def test_what_a_file_system_does_for_a_while_is_temporary(
    tmp_path, monkeypatch, call, number, kind
):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["x"]))
    source = opened("files", tmp_path)

    def failing(*_):
        raise OSError(getattr(errno, number), "failed")

    monkeypatch.setattr(call, failing, raising=False)
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(") as error:
        source.describe() if call.endswith("sha256") else documents(source)
    assert type(error.value) is kind


def test_the_standard_library_and_raw_bytes_say_what_is_temporary(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.ESTALE, "failed")

    monkeypatch.setattr("data_prep.sources.local.open", failing, raising=False)
    with pytest.raises(TemporaryError, match=r"\.py: cannot be read \("):
        next(object.__new__(PythonStdlib).read(Part(tmp_path / "x.py", "x.py")))
    (tmp_path / "text8").write_bytes(b"text")
    monkeypatch.setattr(raw_bytes, "sha256", failing)
    with pytest.raises(TemporaryError, match=r"^--path .*text8: cannot be read \("):
        raw_bytes._describe_source(tmp_path / "text8", [4])


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    real = os.scandir

    def scandir(folder):  # the tests may run as root, whom no mode stops
        if str(folder).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"closed: cannot be read \(no permission\)"):
        texts(tmp_path)


def test_hidden_folders_are_named_but_for_ours(tmp_path):
    """The manifest is the same before a preparation has made its own folders and after."""
    text = ("a.txt", ".trash/b.txt", "sub/.old/c.txt", ".git/d.txt", ".cache/e.txt", ".x.tmp/f.md")
    ours = (".x.tmp/.cat_lm.json", ".scratch/parts/.cat_lm.json")
    for name in (*text, *ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".empty").mkdir()
    source = opened("files", tmp_path)
    assert names(source) == names(opened("files", f"{tmp_path}/**/*.txt"))
    assert names(source) == ["a.txt"]
    assert source.notes(0.05) == [
        "left out, hidden or of no known kind (2 folder) (files: 2): .trash/, sub/.old/"
    ]
    assert not opened("files", tmp_path, exclude=(".trash/*", "*.old/")).left_out


def test_a_file_is_taken_once_and_for_one_split(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("x")
    assert texts(f"{tmp_path}/**/**/*.txt") == ["x"]
    (tmp_path / "b.txt").write_text("y")
    with pytest.raises(UserError, match=r"--validation-path .*: --path has .*sub/a.txt too"):
        texts(tmp_path, validation_path=f"{tmp_path}/sub")


def test_a_file_whose_name_is_not_utf8_is_refused(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as stream:
        stream.write("x")
    with pytest.raises(UserError, match=r"--path .*: the name '.*udcff\.txt' is not UTF-8"):
        texts(tmp_path)


def test_a_file_that_changes_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one", "two", ""]))
    source = opened("files", tmp_path)
    (part,) = source.parts
    found = source.read(part)
    next(found)
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))  # written to, with as many bytes
    with pytest.raises(UserError, match=r"a\.jsonl: has changed since the preparation began"):
        list(found)
    assert len(list(source.read(part))) == len(["one", "two", ""])
    with open(tmp_path / "a.jsonl", "ab") as stream:
        stream.write(json_lines(["late"]))
    with pytest.raises(UserError, match="has changed"):
        next(source.read(part))


def test_files_that_are_not_read_are_counted_and_named(tmp_path):
    for name in ("a.jsonl", "b.csv", "sub/c.csv", "sub/README", ".d.jsonl", ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines([name]))
    os.mkfifo(tmp_path / "e.txt")
    os.link(tmp_path / "a.jsonl", tmp_path / "f.jsonl")
    (tmp_path / "blob").symlink_to("a.jsonl")  # of no known kind, but read under its other name
    source = opened("files", tmp_path)
    assert texts(tmp_path) == ["a.jsonl"]
    unread, _ = source.left_out
    assert unread.names == (".d.jsonl", "b.csv", "e.txt", "sub/README", "sub/c.csv")
    assert source.notes(0.05) == [
        "left out, hidden or of no known kind (2 .csv, 1 .jsonl, 1 .txt, 1 no suffix) (files: 5): "
        ".d.jsonl, b.csv, e.txt, …",
        "read once though listed again (files: 1): f.jsonl is a.jsonl",
    ]
    assert opened("files", f"{tmp_path}/[as]*").left_out[0].names == ("sub/",)
    source = opened("files", tmp_path, exclude=("*.csv", "*/README", "a*"))
    assert names(source) == ["f.jsonl"], "another name of a file that is left out is read"
    assert [entry.names for entry in source.left_out] == [(".d.jsonl", "e.txt")]


def test_one_file_in_two_splits_is_refused(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / name).mkdir()
    (tmp_path / "train" / "a.jsonl").write_bytes(json_lines(["x"]))
    (tmp_path / "validation" / "a.jsonl").symlink_to("../train/a.jsonl")
    with pytest.raises(UserError, match=r"is the same file as .*, of another split"):
        opened("slimpajama", tmp_path)
