"""Where documents come from: the standard library, files, SlimPajama.

A source is a list of parts in a fixed order (a part is a file, here or on the Hub) and a way to
read each; so its documents have one order, on every machine and for any number of workers. Files
are in natural order, in which runs of digits count as numbers (chunk2 before chunk10); training
text comes before validation text.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cat_lm.errors import UserError, describe_os_error
from cat_lm.io.checksums import sha256
from data_prep.documents import (
    TEXT_PER_FILE_BYTE,
    Document,
    Malformed,
    Reading,
    read_file,
    suffix_of,
)

HUB_PREFIX = "hub:"
UNKNOWN_SET = "unknown"
# The sets that SlimPajama's documents name in meta.redpajama_set_name.
KNOWN_SETS = (
    "RedPajamaArXiv",
    "RedPajamaBook",
    "RedPajamaC4",
    "RedPajamaCommonCrawl",
    "RedPajamaGithub",
    "RedPajamaStackExchange",
    "RedPajamaWikipedia",
)
HASHED_BYTES = 256_000_000  # of a source's files: about a second of hashing
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


@dataclass(frozen=True)
class Part:
    """A piece of a source that is read in one go: a file, with the split it is known to be of.

    `name` is the same on every machine, and for a copy and the Hub. `size` is in bytes, None for a
    split that `datasets` streams; `sha256` is there where the Hub lists it.
    """

    path: Path | str
    name: str
    split: str | None = None
    size: int | None = None
    sha256: str | None = None

    @property
    def text_bytes(self) -> int | None:
        """About how many bytes of text there are; None where it cannot be known beforehand."""
        if self.size is None:
            return None
        return int(TEXT_PER_FILE_BYTE.get(suffix_of(self.path), 1.0) * self.size)


class Source:
    """Documents in a fixed order. Subclasses set `kind` and `parts` and implement `read`.

    A source can be pickled: its parts may be read in any process, in any order, any number of times
    with equal result.
    """

    kind: str
    parts: list[Part]

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        """The documents of one part, in order, and in their places the lines that hold none.

        Raises `UserError` for a part that cannot be read as a whole.
        """
        raise NotImplementedError

    @property
    def has_validation(self) -> bool:
        """Whether the source brings its own validation split."""
        return any(part.split == "validation" for part in self.parts)

    def text_bytes(self) -> int | None:
        """About how many bytes of text there are; None where it cannot be known beforehand."""
        sizes = [part.text_bytes for part in self.parts]
        return None if None in sizes else sum(sizes)

    def describe(self) -> dict:
        """What the manifest says of the source; equal for equal input, on every machine.

        Local sources of up to `HASHED_BYTES` are described by the contents of their files too.
        Larger ones only by names and sizes, because reading terabytes to find that nothing is to
        be done takes hours: there, an edit that keeps a file's size is not noticed.

        Raises UserError where a file cannot be read.
        """
        listing = "".join(
            " ".join(filter(None, (part.name, str(part.size), part.sha256))) + "\n"
            for part in self.parts
        )
        size = None if any(p.size is None for p in self.parts) else sum(p.size for p in self.parts)
        description = {
            "kind": self.kind,
            "files": len(self.parts),
            "file_bytes": size,
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }
        local = all(isinstance(part.path, Path) for part in self.parts)
        if local and size <= HASHED_BYTES:
            description["contents_sha256"] = _contents_sha256(self.parts)
        return description


class PythonStdlib(Source):
    """The source files of the running interpreter's standard library, tests left out."""

    kind = "python-stdlib"

    def __init__(self) -> None:
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

    def read(self, part: Part) -> Iterator[Document]:
        try:
            with open(part.path, "rb") as stream:
                encoding, _ = tokenize.detect_encoding(stream.readline)
            text = part.path.read_bytes().decode(encoding)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"{part.path}: cannot be read ({error})") from None
        yield Document(text, self.kind)

    def describe(self) -> dict:
        return {**super().describe(), "python_version": platform.python_version()}


class Files(Source):
    """Text, markdown, JSON lines and parquet files: one file, a folder, or a glob pattern.

    A document's set is what it names under the set key, or else the kind of its file ("jsonl").
    """

    kind = "files"

    def __init__(self, path: str, reading: Reading, validation_path: str | None = None) -> None:
        self.path = path
        self.reading = reading
        if validation_path is None:
            self.parts = _find_files(path, "--path")
            return
        found = {
            "train": _find_files(path, "--path"),
            "validation": _find_files(validation_path, "--validation-path"),
        }
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
        for item in read_file(part.path, part.name, part.size, self.reading):
            if isinstance(item, Malformed):
                yield item
            else:
                text, record = item
                yield Document(text, set_name(record, self.reading, kind), part.split)

    def describe(self) -> dict:
        return {**super().describe(), "path": self.path}


class SlimPajama(Source):
    """A local mirror in SlimPajama's layout: `train/chunk*/….jsonl.zst`, `validation/`.

    `test/` is left for evaluation; a folder of its own, it can be read as `files`.
    """

    kind = "slimpajama"

    def __init__(self, path: str, reading: Reading) -> None:
        self.path = path
        self.reading = reading
        root = Path(path)
        if not (root / "train").is_dir():
            raise UserError(
                f"--path {path}: no folder with train/ in it; give a local mirror of SlimPajama, "
                f"or {HUB_PREFIX}OWNER/NAME[/FOLDER][@REVISION]"
            )
        splits = [split for split in ("train", "validation") if (root / split).is_dir()]
        self.parts = [
            Part(part.path, f"{split}/{part.name}", split if len(splits) > 1 else None, part.size)
            for split in splits
            for part in _find_files(str(root / split), "--path")
        ]

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        for item in read_file(part.path, part.name, part.size, self.reading):
            if isinstance(item, Malformed):
                yield item
            else:
                yield Document(item[0], set_name(item[1], self.reading), part.split)

    def describe(self) -> dict:
        return {**super().describe(), "path": self.path}


def open_source(
    kind: str, path: str | None, reading: Reading, validation_path: str | None = None
) -> Source:
    """The source that the command line asks for. Raises `UserError` where there is no such thing"""
    if kind == "python-stdlib":
        if path or validation_path:
            raise UserError("--source python-stdlib takes no --path: it reads the interpreter's")
        return PythonStdlib()
    if not path:
        raise UserError(f"--source {kind} needs --path")
    if kind == "files":
        return Files(path, reading, validation_path)
    if validation_path:
        raise UserError("--validation-path goes with --source files")
    if path.startswith(HUB_PREFIX):
        from data_prep.hub import Hub

        return Hub(path, reading)
    return SlimPajama(path, reading)


def set_name(record: dict, reading: Reading, default: str = UNKNOWN_SET) -> str:
    """The named set that a record belongs to; `default` where it names none.

    The objects on the way to it may be written out as JSON, as in some parquet mirrors. A name
    that cannot be printed comes with escapes.
    """
    value: object = record
    for key in reading.set_key.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return default
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value:
        return default
    return value if value.isprintable() else value.encode("unicode_escape").decode()


def sample_texts(
    source: Source,
    seed: int,
    max_bytes: int,
    is_training: Callable[[Document], bool],
    max_parts: int = 64,
) -> Iterator[str]:
    """About `max_bytes` of training text from up to `max_parts` parts, chosen by a hash of `seed`.

    Each part gives its share from its beginning, so that a sample of a huge corpus reads little.
    """
    parts = [part for part in source.parts if part.split != "validation"]
    parts.sort(key=lambda part: hashlib.sha256(f"{seed} {part.name}".encode()).digest())
    share = max(1, max_bytes // min(len(parts), max_parts))
    total = 0
    for part in parts:
        taken = 0
        for document in source.read(part):
            if taken >= share or total >= max_bytes:
                break
            if isinstance(document, Malformed) or not document.text:
                continue
            if not is_training(document):
                continue
            text = document.text[: max(share, max_bytes // 16)]
            taken += len(text)
            total += len(text)
            yield text
        if total >= max_bytes:
            return


def _contents_sha256(parts: Iterable[Part]) -> str:
    """One hash over the hashes of the parts' files, in the parts' order."""
    total = hashlib.sha256()
    for part in parts:
        try:
            total.update(bytes.fromhex(sha256(part.path)))
        except OSError as error:
            raise UserError(f"{part.path}: cannot be read ({describe_os_error(error)})") from None
    return total.hexdigest()


def in_natural_order(parts: Iterable[Part]) -> list[Part]:
    """Parts by name, runs of digits in it taken as numbers: chunk1, chunk2, …, chunk10."""

    def key(part: Part) -> tuple[list[str | int], str]:
        pieces = re.split(r"([0-9]+)", part.name)  # text and digits in turn
        return [int(p) if i % 2 else p for i, p in enumerate(pieces)], part.name

    return sorted(parts, key=key)


def _below(root: Path) -> Iterator[Path]:
    """All that is below a folder, and behind links to folders; not a link's own folders above."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({describe_os_error(error)})")

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        here = Path(folder).resolve()
        folders[:] = [n for n in folders if not here.is_relative_to(Path(folder, n).resolve())]
        yield from (Path(folder, name) for name in names)


def _find_files(path: str, flag: str) -> list[Part]:
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
        candidates = {Path(name) for name in glob.glob(path, recursive=True)}  # ** may match twice
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
