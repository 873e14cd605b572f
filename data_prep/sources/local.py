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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.folders import MARK
from cat_lm.core.readers import clipped
from cat_lm.data.manifest import MANIFEST
from data_prep.common.amounts import cut
from data_prep.common.unfinished import MARKER
from data_prep.sources.base import LeftOut, Part, Source, in_natural_order, read_once, set_name
from data_prep.sources.documents import (
    KNOWN_KINDS,
    Document,
    Malformed,
    Reading,
    read_file,
    suffix_of,
)
from data_prep.sources.single import Division, describe_divisions, divide, take_piece, with_text

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
        (found,) = left_in([Found(self.parts)], exclude)
        self.parts = found.parts

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
    """Text, markdown, JSON lines (packed or not) and parquet: a file, a folder, or a glob pattern.

    A document's set is what it names under the set key, or else the kind of its file ("jsonl").
    Files that a pattern of `exclude` matches are left out, see `left_in`.
    With `validation_fraction`, a single document is divided: that share of it, at its end, is the
    validation split. So are text files that are larger than that share of the whole, of which none
    can be held out. All other documents are left to the hash of their texts.
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
        if validation_path is None:
            (found,) = left_in([find_files(path, "--path")], exclude)
            self.parts, repeated = read_once(found.parts, found.identity)
            self.left_out = [*found.left_out(), *repeated]
            if validation_fraction is not None:
                self.divisions = divide(self.parts, reading, validation_fraction)
            if self.divisions:
                divided = {division.file.path: division.parts() for division in self.divisions}
                pieces = [divided.get(part.path, [part]) for part in with_text(self.parts)]
                held_out = [last for _, *rest in pieces for last in rest]
                self.parts = [first for first, *_ in pieces] + held_out
            return
        both_paths = (path, "--path"), (validation_path, "--validation-path")
        both = left_in([find_files(*where) for where in both_paths], exclude)
        held_out = set(map(both[1].identity, both[1].parts))
        if shared := [p.path for p in both[0].parts if both[0].identity(p) in held_out]:
            raise UserError(
                f"--validation-path {validation_path}: --path has {shared[0]} too; what is held "
                "out must not be trained on"
            )
        self.parts, self.left_out = [], []
        for split, found in zip(("train", "validation"), both, strict=True):
            found = found.below(split)
            parts, repeated = read_once(found.parts, found.identity)
            self.parts += parts
            self.left_out += [*found.left_out(), *repeated]

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
        entries = [division.describe() for division in self.divisions]
        if len(entries) > 1:
            sums = {k: sum(e[k] for e in entries) for k in ("train_bytes", "validation_bytes")}
            entries = [{"files": len(entries), **sums}]
        return {**description, "divided": entries[0]}


# What a file is known by whatever its name: device, inode, size and time of the last change. The
# latter two, since some file systems give several files one number.
Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Found:
    """The files that a path stands for: those to read, and the names of the others."""

    parts: list[Part]
    others: Sequence[str] = ()
    identities: dict[Path, Identity] | None = None

    def identity(self, part: Part) -> Identity:
        """Return what is equal for all names and links of a file."""
        return self.identities[part.path]

    def below(self, split: str) -> Found:
        """Return the same files as those of a split."""
        parts = [replace(part, name=f"{split}/{part.name}", split=split) for part in self.parts]
        return replace(self, parts=parts, others=[f"{split}/{name}" for name in self.others])

    def without(self, patterns: Sequence[str]) -> Found:
        """Return what no pattern matches."""
        parts = [part for part in self.parts if not _matches_any(part.name, patterns)]
        others = [name for name in self.others if not _matches_any(name, patterns)]
        return replace(self, parts=parts, others=others)

    def left_out(self) -> list[LeftOut]:
        """Return an entry on the others, if there are any."""
        return describe_unread(self.others)


def describe_unread(names: Sequence[str]) -> list[LeftOut]:
    """Return an entry on files that are hidden or of no known kind, with their commonest kinds."""
    suffixes = (Path(name).suffix or "no suffix" for name in names if not name.endswith("/"))
    folders = ("folder" for name in names if name.endswith("/"))
    kinds = Counter(itertools.chain(suffixes, folders)).most_common(5)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds)
    return LeftOut.of(f"left out, hidden or of no known kind ({clipped(counts, 200)})", names)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def left_in(found: Sequence[Found], exclude: Sequence[str]) -> list[Found]:
    """Leave the files out that a pattern matches by their names, in which * stands for / too.

    Args:
        found: what each path stands for; a pattern is to match a file of any of them.

    Raises:
        UserError: a pattern matches no file, since it is mistyped, or a path is left without any.
    """
    names = [part.name for files in found for part in files.parts]
    others = [name for files in found for name in files.others]
    for pattern in exclude:
        if not any(_matches_any(name, [pattern]) for name in itertools.chain(names, others)):
            example = max(names, key=lambda name: "/" in name)  # the first below a folder
            raise UserError(
                f"--exclude {cut(pattern)}: matches no file; they have names such as {example}"
            )
    kept = [files.without(exclude) for files in found]
    if not all(files.parts for files in kept):
        raise UserError(f"--exclude {cut(','.join(exclude))}: leaves no file")
    return kept


def _below(root: Path) -> Iterator[Path]:
    """Yield all files below a folder and behind links to folders, and the hidden folders.

    These are not looked into. A link to a folder that the walk is in already, by whatever links, is
    not followed.
    """

    def refuse(error: OSError) -> None:
        text = f"{error.filename}: cannot be read ({describe_os_error(error)})"
        raise file_error(text, error)

    # Of each folder to come, the folders whose links lead to it.
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
            if way != before and _leads_up(Path(path).resolve(), way):
                folders.remove(name)
            else:
                left[path] = way
        yield from (Path(folder, name) for name in names)


def _leads_up(target: Path, way: Sequence[Path]) -> bool:
    return any(folder.is_relative_to(target) for folder in way)


def matches(pattern: str) -> Iterator[Path]:
    """Yield what a glob matches; ** goes through folders as `_below` does.

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
            for file, names in files:
                # What a hidden folder holds might fit; it is a match by itself, to be named.
                hidden = file.name.startswith(".") and file.is_dir()
                ends = range(cut + 1, len(pieces) + 1) if hidden else (len(pieces),)
                if any(_fits(names, pieces[cut:end]) for end in ends):
                    yield file


def _fits(names: Sequence[str], pieces: Sequence[str]) -> bool:
    """Return True if a path's names are what a pattern's pieces stand for, ** for any number."""
    if not pieces:
        return not names
    if pieces[0] == "**":
        rests = (names[start:] for start in range(len(names) + 1))
        return len(pieces) == 1 or any(_fits(rest, pieces[1:]) for rest in rests)
    return bool(names) and fnmatch.fnmatchcase(names[0], pieces[0]) and _fits(names[1:], pieces[1:])


def find_files(path: str, flag: str) -> Found:
    """Files that `path` (a file, folder or glob) stands for, with names relative to it.

    The names of a glob's matches are relative to the folders before its first wildcard.
    """
    root = Path(path)
    if root.is_file():
        if suffix_of(root) is None:
            raise UserError(f"{flag} {path}: unknown kind of file; known are {KNOWN_KINDS}")
        part = Part(root, root.name, None, root.stat().st_size)
        return Found([part], identities={root: _identity(root)})
    if root.is_dir():
        candidates = _below(root)
    else:
        candidates = list(matches(path))
        root = Path(*itertools.takewhile(lambda piece: not glob.has_magic(piece), root.parts))
        if not candidates:
            raise UserError(f"{flag} {path}: no such file or folder, and no match as a pattern")
    found, others, identities = [], [], {}
    for file in candidates:
        if _is_hidden(file, root) or not suffix_of(file):
            others.append(file)
            continue
        if file.is_symlink() and not file.exists():
            raise UserError(f"{flag} {path}: {file} is a link to nothing")
        if not file.is_file():
            others.append(file)
            continue
        if str(file) != str(file).encode(errors="replace").decode():
            raise UserError(f"{flag} {path}: the name {str(file)!a} is not UTF-8; rename it")
        identities[file] = _identity(file)
        size = identities[file][2]
        found.append(Part(file, file.relative_to(root).as_posix(), None, size))
    if not found:
        raise UserError(f"{flag} {path}: no file of a known kind in it ({KNOWN_KINDS})")
    return Found(in_natural_order(found), _name_unread(others, root, identities), identities)


def _name_unread(others: list[Path], root: Path, identities: dict[Path, Identity]) -> list[str]:
    """Return the names of the files that somebody may miss.

    Not those of our own prepared folders, perhaps of the one that is being made: the manifest would
    differ after a restart. Nor other names of files that are read: the Hub's cache has hashes. Nor
    hidden files of no known kind, git's folder and caches.
    """
    ours = {file.parent for file in others if file.name in (MARKER, MARK)}
    indexed = {file.parent for file in others if file.suffix == ".idx"}
    ours |= indexed & {file.parent for file in others if file.name == MANIFEST}
    ours.discard(root)
    ours |= {file for file in others if file.is_dir() and _is_passed_over(file)}
    read = set(identities.values())
    return sorted(
        file.relative_to(root).as_posix() + "/" * file.is_dir()
        for file in others
        if (suffix_of(file) or not _is_hidden(file, root) or file.is_dir())
        and ours.isdisjoint((file, *file.parents))
        and not (file.is_file() and _identity(file) in read)
    )


def _is_passed_over(folder: Path) -> bool:
    """Return True if nothing is in a folder but what our commands, git or caches keep there."""
    marks = (MARK, MARKER, "train-00000.idx")
    if folder.name in (".git", ".cache"):
        return True
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    inner = [[os.path.lexists(folder / name / mark) for mark in marks] for name in names]
    return not set(marks).isdisjoint(names) or all(map(any, inner))


def _is_hidden(file: Path, root: Path) -> bool:
    return any(piece.startswith(".") for piece in file.relative_to(root).parts)


def _identity(file: Path) -> Identity:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
