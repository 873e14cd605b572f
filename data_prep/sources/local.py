"""Local sources: Python's standard library, and files of text."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import platform
import sys
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.folders import MARK
from cat_lm.core.readers import clipped
from cat_lm.data.manifest import MANIFEST
from data_prep.sources.base import (
    LeftOut,
    Part,
    Source,
    in_natural_order,
    read_once,
    set_name,
    unreadable,
)
from data_prep.sources.documents import (
    KNOWN_KINDS,
    Document,
    Malformed,
    Reading,
    read_file,
    suffix_of,
)
from data_prep.sources.single import Division, describe_divisions, divide, drop_empty, take_piece

# Parts of the standard library that Linux distributions package separately or leave out. Without
# them and the tests, every build of one Python version has the same files.
NOT_EVERYWHERE = {
    *("__pycache__", "distutils", "ensurepip", "idlelib", "lib2to3", "macholib", "site-packages"),
    *("test", "tests", "tkinter", "turtle", "turtledemo"),
}


class PythonStdlib(Source):
    """The source files of the running interpreter's standard library, without tests."""

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
        parts = [Part(root / name, name, size=(root / name).stat().st_size) for name in chosen]
        (found,) = exclude_matches([Found(parts)], exclude)
        self.parts = found.parts

    def read(self, part: Part) -> Iterator[Document]:
        try:
            with open(part.path, "rb") as stream:
                encoding, _ = tokenize.detect_encoding(stream.readline)
            text = part.path.read_bytes().decode(encoding)
        except OSError as error:
            raise unreadable(part.path, error) from None
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"{part.path}: cannot be read ({error})") from None
        yield Document(text, self.kind)

    def describe(self) -> dict:
        return {**super().describe(), "python_version": platform.python_version()}


class Files(Source):
    """Text, markdown, JSON lines (compressed or not) and parquet: a file, folder or glob pattern.

    A document's set is the value of the set key, or else the type of its file ("jsonl"). With
    `validation_fraction`, texts that are too large for the validation split are divided, see
    `divide`. The split of all other documents is decided by the hash of their texts.
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
        self.divisions: list[Division] = []
        if validation_path is not None:
            self._read_both(path, validation_path, exclude)
            return
        (found,) = exclude_matches([find_files(path, "--path")], exclude)
        self.parts, repeated = read_once(found.parts)
        self.left_out = [*describe_unread(found.others), *repeated]
        if validation_fraction is not None:
            self.divisions = divide(self.parts, reading, validation_fraction)
        if self.divisions:
            divided = {division.file.path: division.parts() for division in self.divisions}
            pieces = [divided.get(part.path, [part]) for part in drop_empty(self.parts)]
            held_out = [last for _, *rest in pieces for last in rest]
            self.parts = [first for first, *_ in pieces] + held_out

    def _read_both(self, path: str, validation_path: str, exclude: Sequence[str]) -> None:
        both_paths = (path, "--path"), (validation_path, "--validation-path")
        both = exclude_matches([find_files(*where) for where in both_paths], exclude)
        held_out = {part.identity for part in both[1].parts}
        if shared := [part.path for part in both[0].parts if part.identity in held_out]:
            raise UserError(
                f"--validation-path {validation_path}: --path has {shared[0]} too; what is held "
                "out must not be trained on"
            )
        self.parts, self.left_out = [], []
        for split, found in zip(("train", "validation"), both, strict=True):
            own = [replace(p, name=f"{split}/{p.name}", split=split) for p in found.parts]
            parts, repeated = read_once(own)
            self.parts += parts
            others = describe_unread([f"{split}/{name}" for name in found.others])
            self.left_out += [*others, *repeated]

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
        divided = [describe_divisions(self.divisions)] if self.divisions else []
        return [*super().notes(held_out), *divided]

    def describe(self) -> dict:
        description = {**super().describe(), "path": self.path}
        if not self.divisions:
            return description
        keys = ("train_bytes", "validation_bytes")
        sums = {key: sum(getattr(cut, key) for cut in self.divisions) for key in keys}
        several = len(self.divisions) > 1
        what = {"files": len(self.divisions)} if several else {"at_end_of": self.divisions[0].place}
        return {**description, "divided": {**what, **sums}}


@dataclass(frozen=True)
class Found:
    """The files that a path includes: those to read, and the names of the others."""

    parts: list[Part]
    others: Sequence[str] = ()


def describe_unread(names: Sequence[str]) -> list[LeftOut]:
    """Return an entry about files that are hidden or of unknown types, with the commonest types."""
    suffixes = (Path(name).suffix or "no suffix" for name in names if not name.endswith("/"))
    folders = ("folder" for name in names if name.endswith("/"))
    kinds = Counter(itertools.chain(suffixes, folders)).most_common(5)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds)
    return LeftOut.of(f"left out, hidden or of no known kind ({clipped(counts, 200)})", names)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def exclude_matches(found: Sequence[Found], exclude: Sequence[str]) -> list[Found]:
    """Return the files whose names match no pattern; * in a pattern also matches /.

    Args:
        found: the files of each path; every pattern must match a file of at least one path.

    Raises:
        UserError: a pattern matches no file, or all files of a path are excluded.
    """
    names = [part.name for files in found for part in files.parts]
    others = [name for files in found for name in files.others]
    for pattern in exclude:
        if not any(_matches_any(name, [pattern]) for name in itertools.chain(names, others)):
            example = max(names, key=lambda name: "/" in name)  # prefers a file in a folder
            raise UserError(
                f"--exclude {clipped(pattern)}: matches no file; they have names such as {example}"
            )
    kept = []
    for files in found:
        parts = [part for part in files.parts if not _matches_any(part.name, exclude)]
        others = [name for name in files.others if not _matches_any(name, exclude)]
        kept.append(replace(files, parts=parts, others=others))
    if not all(files.parts for files in kept):
        raise UserError(f"--exclude {clipped(','.join(exclude))}: leaves no file")
    return kept


def _walk_files(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, also through links to folders, and the hidden folders.

    Hidden folders are not entered. A link to a folder that contains the link is not followed.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    # For each folder to visit, the folders whose links lead to it.
    left: dict[str, tuple[Path, ...]] = {str(root): ()}
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        before = left.pop(folder)
        for name in tuple(folders):
            path = os.path.join(folder, name)
            if name.startswith("."):
                folders.remove(name)
                yield Path(path)
                continue
            way = (*before, Path(folder).resolve()) if os.path.islink(path) else before
            target = Path(path).resolve()
            if way != before and any(above.is_relative_to(target) for above in way):
                folders.remove(name)
            else:
                left[path] = way
        yield from (Path(folder, name) for name in names)


def matches(pattern: str) -> Iterator[Path]:
    """Yield the files that a glob matches; ** walks through folders as `_walk_files` does.

    The standard library's glob follows links to parent folders, with two of them forever.
    """
    pieces = Path(pattern).parts
    if "**" not in pieces:
        yield from map(Path, glob.iglob(pattern))
        return
    cut = pieces.index("**")
    for top in map(Path, glob.glob(os.path.join(*pieces[:cut], "") or "./")):
        for file in _walk_files(top):
            if _matches_pattern(file.relative_to(top).parts, pieces[cut:]):
                yield file


def _matches_pattern(names: Sequence[str], pieces: Sequence[str]) -> bool:
    """Return True if the names of a path match the pieces of a pattern, ** any number of them."""
    if not pieces:
        return not names
    if pieces[0] == "**":
        rests = (names[start:] for start in range(len(names) + 1))
        return len(pieces) == 1 or any(_matches_pattern(rest, pieces[1:]) for rest in rests)
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], pieces[0])
        and _matches_pattern(names[1:], pieces[1:])
    )


def find_files(path: str, flag: str) -> Found:
    """Return the files of `path` (a file, folder or glob), with names relative to it.

    Names of a glob's matches are relative to the folders before its first wildcard.

    Raises:
        UserError: there are none; the message begins with `flag`.
    """
    root = Path(path)
    if root.is_file():
        if suffix_of(root) is None:
            raise UserError(f"{flag} {path}: unknown kind of file; known are {KNOWN_KINDS}")
        return Found([_make_part(root, root.name)])
    if root.is_dir():
        candidates = _walk_files(root)
    else:
        candidates = list(matches(path))
        root = Path(*itertools.takewhile(lambda piece: not glob.has_magic(piece), root.parts))
        if not candidates:
            raise UserError(f"{flag} {path}: no such file or folder, and no match as a pattern")
    found, others = [], []
    for file in candidates:
        is_passed_over = _is_hidden(file, root) or not suffix_of(file)
        if file.is_symlink() and not file.exists() and not is_passed_over:
            raise UserError(f"{flag} {path}: {file} is a link to nothing")
        if is_passed_over or not file.is_file():
            others.append(file)
            continue
        if str(file) != str(file).encode(errors="replace").decode():
            raise UserError(f"{flag} {path}: the name {str(file)!a} is not UTF-8; rename it")
        found.append(_make_part(file, file.relative_to(root).as_posix()))
    if not found:
        raise UserError(f"{flag} {path}: no file of a known kind in it ({KNOWN_KINDS})")
    return Found(in_natural_order(found), _names_to_report(others, root, found))


def _make_part(file: Path, name: str) -> Part:
    status = file.stat()
    # Include size and time, since some file systems give several files the same inode number.
    own = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return Part(file, name, size=status.st_size, identity=own)


def _names_to_report(others: list[Path], root: Path, parts: list[Part]) -> list[str]:
    """Return the names of left-out files that a user may expect to be read.

    These are not: files of prepared folders, perhaps of the one in progress, with which the
    manifest would differ after a restart; other names of files that are read, such as the hashes in
    the Hub's cache; hidden files of unknown types; git's folder and caches.
    """
    indexed = {file.parent for file in others if file.suffix == ".idx"}
    ours = indexed & {file.parent for file in others if file.name == MANIFEST}
    ours |= {file.parent for file in others if file.name == MARK}
    ours.discard(root)
    ours |= {file for file in others if file.is_dir() and _is_ignored_folder(file)}
    read = {part.identity for part in parts}
    return sorted(
        file.relative_to(root).as_posix() + "/" * file.is_dir()
        for file in others
        if (suffix_of(file) or not _is_hidden(file, root) or file.is_dir())
        and ours.isdisjoint((file, *file.parents))
        and not (file.is_file() and _make_part(file, "").identity in read)
    )


def _is_ignored_folder(folder: Path) -> bool:
    if folder.name in (".git", ".cache") or (folder / MARK).is_file():
        return True
    try:
        return all((inner / MARK).is_file() for inner in folder.iterdir())
    except OSError:
        return False


def _is_hidden(file: Path, root: Path) -> bool:
    return any(piece.startswith(".") for piece in file.relative_to(root).parts)
