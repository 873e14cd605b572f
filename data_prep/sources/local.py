"""Documents on this machine: the standard library, and files of text."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from cat_lm.errors import UserError, describe_os_error, file_error
from data_prep.amounts import cut
from data_prep.sources.base import Part, Source, in_natural_order, set_name
from data_prep.sources.documents import (
    TEXT_PER_FILE_BYTE,
    Document,
    Malformed,
    Reading,
    read_file,
    suffix_of,
)
from data_prep.sources.single import Division, divide, take_piece

# Parts of the standard library that Linux distributions put into packages of their own, or leave
# out; without them and the tests every build of one Python version has the same files.
NOT_EVERYWHERE = {
    "__pycache__",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "macholib",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtle",
    "turtledemo",
}


class PythonStdlib(Source):
    """The source files of the running interpreter's standard library, tests left out."""

    kind = "python-stdlib"

    def __init__(self, exclude: Sequence[str] = ()) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = (path.relative_to(root) for path in root.rglob("*.py"))
        chosen = sorted(
            path.as_posix()
            for path in files
            if path.parts[0].removesuffix(".py") in sys.stdlib_module_names
            and not NOT_EVERYWHERE.intersection(path.with_suffix("").parts)
        )
        if not chosen:
            raise UserError(f"{root}: no source files of the standard library; use --source files")
        sizes = ((root / name).stat().st_size for name in chosen)
        self.parts = [
            Part(root / name, name, size=size) for name, size in zip(chosen, sizes, strict=True)
        ]
        (self.parts,) = left_in([self.parts], exclude)

    def read(self, part: Part) -> Iterator[Document]:
        try:
            with open(part.path, "rb") as stream:
                encoding, _ = tokenize.detect_encoding(stream.readline)
            text = part.path.read_bytes().decode(encoding)
        except OSError as error:
            text = f"{part.path}: cannot be read ({describe_os_error(error)})"
            raise file_error(text, error) from None
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"{part.path}: cannot be read ({error})") from None
        yield Document(text, self.kind)

    def describe(self) -> dict:
        return {**super().describe(), "python_version": platform.python_version()}


class Files(Source):
    """Text, markdown, JSON lines and parquet files: one file, a folder, or a glob pattern.

    A document's set is what it names under the set key, or else the kind of its file ("jsonl").
    Files that a pattern of `exclude` matches are left out, see `left_in`.
    With `validation_fraction`, a single document is divided: that share of it, at its end, is the
    validation split. Several documents are left to the hash of their texts.
    """

    kind = "files"

    def __init__(
        self,
        path: str,
        reading: Reading,
        validation_path: str | None = None,
        validation_fraction: float | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.reading = reading
        self.division: Division | None = None
        if validation_path is None:
            (self.parts,) = left_in([find_files(path, "--path")], exclude)
            if validation_fraction is not None:
                self.division = divide(self.parts, reading, validation_fraction)
            if self.division is not None:
                self.parts = self.division.parts()
            return
        both_paths = (path, "--path"), (validation_path, "--validation-path")
        wanted = left_in([find_files(*where) for where in both_paths], exclude)
        found = dict(zip(("train", "validation"), wanted, strict=True))
        held_out = {part.path.resolve() for part in found["validation"]}
        if both := [part.path for part in found["train"] if part.path.resolve() in held_out]:
            raise UserError(
                f"--validation-path {validation_path}: --path has {both[0]} too; what is held out "
                "must not be trained on"
            )
        self.parts = [
            Part(part.path, f"{split}/{part.name}", split, part.size)
            for split in found
            for part in found[split]
        ]

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        kind = suffix_of(part.path).removeprefix(".")
        size = part.piece.file_size if part.piece else part.size
        records = read_file(part.path, part.name, size, self.reading)
        for item in take_piece(records, part) if part.piece else records:
            if isinstance(item, Malformed):
                yield item
            else:
                text, record = item
                yield Document(text, set_name(record, self.reading, kind), part.split)

    def notes(self, held_out: float) -> list[str]:
        return [self.division.note()] if self.division else []

    def describe(self) -> dict:
        description = {**super().describe(), "path": self.path}
        return (
            {**description, "divided": self.division.describe()} if self.division else description
        )


def left_in(found: Sequence[list[Part]], exclude: Sequence[str]) -> list[list[Part]]:
    """Leave the files out that a pattern matches by their names, in which * stands for / too.

    Args:
        found: what each path stands for; a pattern is to match a file of any of them.

    Raises:
        UserError: a pattern matches no file, since it is mistyped, or a path is left without any.
    """
    names = [part.name for parts in found for part in parts]
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            example = max(names, key=lambda name: "/" in name)  # the first below a folder
            raise UserError(
                f"--exclude {cut(pattern)}: matches no file; they have names such as {example}"
            )
    kept = [
        [part for part in parts if not any(fnmatch.fnmatchcase(part.name, p) for p in exclude)]
        for parts in found
    ]
    if not all(kept):
        raise UserError(f"--exclude {cut(','.join(exclude))}: leaves no file")
    return kept


def _below(root: Path) -> Iterator[Path]:
    """All that is below a folder and behind links to folders, but for what is hidden.

    A link to a folder that the walk is in already, by whatever links, is not followed.
    """

    def refuse(error: OSError) -> None:
        text = f"{error.filename}: cannot be read ({describe_os_error(error)})"
        raise file_error(text, error)

    # Of each folder to come, the folders whose links lead to it.
    left: dict[str, tuple[Path, ...]] = {str(root): ()}
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        before = left.pop(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in tuple(folders):
            path = os.path.join(folder, name)
            way = (*before, Path(folder).resolve()) if os.path.islink(path) else before
            if way != before and _leads_up(Path(path).resolve(), way):
                folders.remove(name)
            else:
                left[path] = way
        yield from (Path(folder, name) for name in names)


def _leads_up(target: Path, way: Sequence[Path]) -> bool:
    return any(folder.is_relative_to(target) for folder in way)


def matches(pattern: str) -> Iterator[Path]:
    """What a glob matches; ** goes through folders as `_below` does.

    The library's goes forty times through a link to a folder above, and past what it cannot list.
    """
    pieces = Path(pattern).parts
    if "**" not in pieces:
        yield from map(Path, glob.iglob(pattern))
        return
    cut = pieces.index("**")
    begin = Path(*pieces[:cut])
    tops = [Path(name) for name in glob.glob(str(begin))] if cut else [begin]
    for top in tops:
        if top.is_dir():
            files = ((file, file.relative_to(top).parts) for file in _below(top))
            yield from (file for file, names in files if _fits(names, pieces[cut:]))


def _fits(names: Sequence[str], pieces: Sequence[str]) -> bool:
    """Tell whether a path's names are what a pattern's pieces stand for, ** for any number."""
    if not pieces:
        return not names
    if pieces[0] == "**":
        rests = (names[start:] for start in range(len(names) + 1))
        return len(pieces) == 1 or any(_fits(rest, pieces[1:]) for rest in rests)
    return bool(names) and fnmatch.fnmatchcase(names[0], pieces[0]) and _fits(names[1:], pieces[1:])


def find_files(path: str, flag: str) -> list[Part]:
    """Files that `path` (a file, folder or glob) stands for, with names relative to it.

    The names of a glob's matches are relative to the folders before its first wildcard.
    """
    known = ", ".join(TEXT_PER_FILE_BYTE)
    root = Path(path)
    if root.is_file():
        if suffix_of(root) is None:
            raise UserError(f"{flag} {path}: unknown kind of file; known are {known}")
        return [Part(root, root.name, None, root.stat().st_size)]
    if root.is_dir():
        candidates = _below(root)
    else:
        candidates = list(matches(path))
        root = Path(*itertools.takewhile(lambda piece: not glob.has_magic(piece), root.parts))
        if not candidates:
            raise UserError(f"{flag} {path}: no such file or folder, and no match as a pattern")
    found = []
    for file in candidates:
        hidden = any(piece.startswith(".") for piece in file.relative_to(root).parts)
        if hidden or not suffix_of(file):
            continue
        if file.is_symlink() and not file.exists():
            raise UserError(f"{flag} {path}: {file} is a link to nothing")
        if file.is_file():
            if str(file) != str(file).encode(errors="replace").decode():
                raise UserError(f"{flag} {path}: the name {str(file)!a} is not UTF-8; rename it")
            found.append(Part(file, file.relative_to(root).as_posix(), None, file.stat().st_size))
    if not found:
        raise UserError(f"{flag} {path}: no file of a known kind in it ({known})")
    return in_natural_order(found)
