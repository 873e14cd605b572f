"""Where documents come from: the standard library, files, SlimPajama.

A source is a list of parts in a fixed order (a part is a file, or a split on the Hub) and a way to
read each; so its documents have one order, on every machine and for any number of workers.
"""

from __future__ import annotations

import glob
import hashlib
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cat_lm.errors import UserError
from cat_lm.files import sha256
from data_prep.documents import (
    TEXT_PER_FILE_BYTE,
    Document,
    Reading,
    read_records,
    suffix_of,
    text_of,
)

HUB_PREFIX = "hub:"
UNKNOWN_SET = "unknown"
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
    """A piece of a source that is read in one go: a file, with the split it is known to be of."""

    path: Path
    name: str
    split: str | None = None


class Source:
    """Documents in a fixed order. Subclasses set `kind` and `parts` and implement `read`."""

    kind: str
    parts: list[Part]

    def read(self, part: Part) -> Iterator[Document]:
        """The documents of one part, in order."""
        raise NotImplementedError

    @property
    def has_validation(self) -> bool:
        """Whether the source brings its own validation split."""
        return any(part.split == "validation" for part in self.parts)

    def text_bytes(self) -> int | None:
        """About how many bytes of text there are; None where it cannot be known beforehand."""
        sizes = [(part, part.path.stat().st_size) for part in self.parts]
        return int(sum(TEXT_PER_FILE_BYTE.get(suffix_of(p.path), 1.0) * size for p, size in sizes))

    def describe(self) -> dict:
        """What the manifest says of the source; equal for equal input, on every machine.

        Sources of up to `HASHED_BYTES` are described by the contents of their files. Larger ones
        only by names and sizes, because reading terabytes to find that nothing is to be done takes
        hours: there, an edit that keeps a file's size is not noticed.

        Raises UserError where a file cannot be read.
        """
        sizes = [part.path.stat().st_size for part in self.parts]
        listing = "".join(
            f"{part.name} {size}\n" for part, size in zip(self.parts, sizes, strict=True)
        )
        description = {
            "kind": self.kind,
            "files": len(self.parts),
            "file_bytes": sum(sizes),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }
        if sum(sizes) <= HASHED_BYTES:
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
        self.parts = [Part(root / name, name) for name in chosen]

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
    """Text, markdown, JSON lines and parquet files: one file, a folder, or a glob pattern."""

    kind = "files"

    def __init__(self, path: str, reading: Reading, validation_path: str | None = None) -> None:
        self.path = path
        self.reading = reading
        split = "train" if validation_path else None
        self.parts = [Part(file, name, split) for file, name in _find_files(path, "--path")]
        if validation_path:
            held_out = _find_files(validation_path, "--validation-path")
            self.parts += [Part(file, name, "validation") for file, name in held_out]

    def read(self, part: Part) -> Iterator[Document]:
        for text, _ in read_records(part.path, self.reading):
            yield Document(text, suffix_of(part.path).removeprefix("."), part.split)

    def describe(self) -> dict:
        return {**super().describe(), "path": self.path}


class SlimPajama(Source):
    """A local mirror in SlimPajama's layout: `train/chunk*/….jsonl.zst`, `validation/`, `test/`."""

    kind = "slimpajama"

    def __init__(self, path: str, reading: Reading) -> None:
        self.path = path
        self.reading = reading
        root = Path(path)
        if not (root / "train").is_dir():
            raise UserError(
                f"--path {path}: no folder with train/ in it; give a local mirror of SlimPajama, "
                f"or {HUB_PREFIX}OWNER/NAME[@REVISION]"
            )
        self.parts = []
        for split in ("train", "validation"):
            if (root / split).is_dir():
                found = _find_files(str(root / split), "--path")
                self.parts += [Part(file, f"{split}/{name}", split) for file, name in found]
        if not self.has_validation:
            self.parts = [Part(part.path, part.name) for part in self.parts]

    def read(self, part: Part) -> Iterator[Document]:
        for text, record in read_records(part.path, self.reading):
            yield Document(text, set_name(record), part.split)

    def describe(self) -> dict:
        return {**super().describe(), "path": self.path}


class Hub(Source):
    """A data set on the Hugging Face Hub with SlimPajama's columns, streamed, at one revision."""

    kind = "slimpajama"

    def __init__(self, path: str, reading: Reading) -> None:
        import datasets

        self.path = path
        self.reading = reading
        self.name, _, revision = path.removeprefix(HUB_PREFIX).partition("@")
        try:
            self.revision = _resolve_revision(self.name, revision or None)
            splits = datasets.get_dataset_split_names(self.name, revision=self.revision)
        except Exception as error:  # the Hub's client raises many kinds, network errors among them
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--path {path}: cannot be read from the Hub ({reason})") from None
        if "train" not in splits:
            raise UserError(f"--path {path}: no train split; it has {', '.join(splits)}")
        self.parts = [Part(Path(name), name, name) for name in ("train", "validation")]
        if "validation" not in splits:
            self.parts = [Part(Path("train"), "train")]

    def read(self, part: Part) -> Iterator[Document]:
        import datasets

        try:
            rows = datasets.load_dataset(
                self.name, split=part.name, streaming=True, revision=self.revision
            )
            for number, record in enumerate(rows, 1):
                where = f"{self.path}: {part.name} row {number}"
                yield Document(text_of(record, self.reading, where), set_name(record), part.split)
        except UserError:
            raise
        except Exception as error:  # as above; datasets has already retried by itself
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"--path {self.path}: streaming stopped ({reason})") from None

    def text_bytes(self) -> int | None:
        return None

    def describe(self) -> dict:
        return {"kind": self.kind, "path": self.path, "revision": self.revision}


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
    return Hub(path, reading) if path.startswith(HUB_PREFIX) else SlimPajama(path, reading)


def set_name(record: dict) -> str:
    """The named set that a SlimPajama record belongs to."""
    meta = record.get("meta")
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    return name if isinstance(name, str) and name else UNKNOWN_SET


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
            if not document.text or not is_training(document):
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
            raise UserError(f"{part.path}: cannot be read ({error.strerror})") from None
    return total.hexdigest()


def _find_files(path: str, flag: str) -> list[tuple[Path, str]]:
    """Files that `path` (a file, folder or glob) stands for, with names relative to it, sorted."""
    known = ", ".join(TEXT_PER_FILE_BYTE)
    root = Path(path)
    if root.is_file():
        if suffix_of(root) is None:
            raise UserError(f"{flag} {path}: unknown kind of file; known are {known}")
        return [(root, root.name)]
    if root.is_dir():
        candidates: Iterable[Path] = root.rglob("*")
    else:
        candidates = [Path(name) for name in glob.glob(path, recursive=True)]
        root = Path()
        if not candidates:
            raise UserError(f"{flag} {path}: no such file or folder, and no match as a pattern")
    found = []
    for file in candidates:
        name = file.relative_to(root).as_posix() if root != Path() else file.as_posix()
        if suffix_of(file) and file.is_file() and not file.name.startswith("."):
            found.append((file, name))
    if not found:
        raise UserError(f"{flag} {path}: no file of a known kind in it ({known})")
    return sorted(found, key=lambda pair: pair[1])


def _resolve_revision(name: str, revision: str | None) -> str:
    """The commit that a branch, tag or nothing stands for now."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name, revision=revision).sha
