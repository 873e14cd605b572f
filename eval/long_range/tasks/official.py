"""Find the official files of a data set in a folder, and say in one line what is wrong with one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256
from cat_lm.core.readers import clipped, read_bytes

LRA = "https://github.com/google-research/long-range-arena (lra_release.gz)"
MAX_FILE_BYTES = 2**34


class Layout(NamedTuple):
    """Where the files of a task may lie below --data, and where they are had.

    Attributes:
        task: its name.
        folders: tried in this order; "" is the folder itself.
        had: an address, and what to take there.
    """

    task: str
    folders: tuple[str, ...]
    had: str

    def refuse(self, path: Path | str, what: str) -> NoReturn:
        """Raise the one line about a file or folder."""
        raise UserError(f"{path}: {what}; the official one is had at {self.had}")


@dataclass(frozen=True)
class Files:
    """The files of a data set, by what they are.

    Attributes:
        paths: kind -> path.
    """

    layout: Layout
    paths: dict[str, Path]

    def key(self) -> dict[str, Any]:
        """Return what tells these files from changed ones, without reading them."""
        found = {kind: (path, path.stat()) for kind, path in self.paths.items()}
        stamps = {k: [p.name, s.st_size, s.st_mtime_ns] for k, (p, s) in found.items()}
        return {"files": stamps}

    def origin(self) -> dict[str, Any]:
        """Name the files with their sha256."""
        return {"files": {path.name: sha256(path) for path in self.paths.values()}}


def base_folder(folder: Path | None, layout: Layout, first: str) -> Path:
    """Find the folder that holds the file or folder `first`.

    Raises:
        UserError: no folder was given, or none has it.
    """
    places = "/".join(filter(None, ("DIR", layout.folders[0], first)))
    if folder is None:
        raise UserError(
            f"task {layout.task}: give --data DIR, where {places} is; it is had at {layout.had}"
        )
    for inner in layout.folders:
        if (folder / inner / first).exists():
            return folder / inner
    if folder.is_file():
        raise UserError(f"--data {folder}: is a file, must be a folder")
    if not folder.is_dir():
        raise UserError(f"--data {folder}: no such folder")
    layout.refuse(folder / layout.folders[0] / first, "no such file or folder")


def find(folder: Path | None, layout: Layout, names: dict[str, Sequence[str]]) -> Files:
    """Find files.

    Args:
        names: kind -> names that it may have, the official one first.

    Raises:
        UserError: one is missing.
    """
    kinds = list(names)
    found = None
    for name in names[kinds[0]]:
        if folder is not None and any((folder / i / name).exists() for i in layout.folders):
            found = base_folder(folder, layout, name)
            break
    base = found or base_folder(folder, layout, names[kinds[0]][0])
    paths = {}
    for kind in kinds:
        here = [base / name for name in names[kind] if (base / name).is_file()]
        if not here:
            layout.refuse(base / names[kind][0], "no such file")
        paths[kind] = here[0]
    return Files(layout, paths)


def read_whole(path: Path, layout: Layout) -> bytes:
    """Read a file, unpacked if its name ends in .gz.

    Raises:
        UserError: it is no whole gzip file, or cannot be read.
    """
    data = read_bytes(path, limit=MAX_FILE_BYTES)
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except EOFError:
        layout.refuse(path, f"is truncated after {len(data):,} bytes of gzip")
    except (OSError, zlib.error) as error:
        layout.refuse(path, f"is no whole gzip file ({clipped(str(error))})")
