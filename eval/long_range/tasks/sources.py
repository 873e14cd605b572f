"""Where data sets are had: official files below a folder, or the Hugging Face Hub at one commit."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cat_lm.core.errors import UserError, reason_of
from cat_lm.core.files import sha256
from cat_lm.core.readers import clipped, read_bytes
from eval.lab.store import key_hash

T = TypeVar("T")
LRA = "https://github.com/google-research/long-range-arena (lra_release.gz)"
MAX_FILE_BYTES = 2**34
_NAMED = 10  # files that an origin names one by one


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        task: its name.
        folders: below --data that may hold its files, tried in order; "" is --data itself.
        files: kind -> name of a file or folder; what ends in .gz may be there unpacked.
        had: an address, and what to take there.
        hub, revision: a data set of the Hub and its commit; empty where the Hub does not have it.
    """

    task: str
    folders: tuple[str, ...]
    files: Mapping[str, str]
    had: str
    hub: str = ""
    revision: str = ""

    def refuse(self, where: Path | str, what: str) -> NoReturn:
        """Raise a UserError about a file or folder."""
        raise UserError(f"{where}: {what}; the official one is had at {self.had}")

    def find(self, folder: Path | None) -> dict[str, Path]:
        """Return the path of each kind of file. Raises UserError where one is missing."""
        first = next(iter(self.files.values()))
        if folder is None:
            place = "/".join(filter(None, ("DIR", self.folders[0], first)))
            raise UserError(
                f"task {self.task}: give --data DIR, where {place} is; it is had at {self.had}"
            )
        if not folder.is_dir():
            raise UserError(f"--data {folder}: no such folder")
        there = [folder / inner for inner in self.folders if _either(folder / inner / first)]
        base = there[0] if there else folder / self.folders[0]
        found = {}
        for kind, name in self.files.items():
            path = _either(base / name)
            if path is None:
                self.refuse(base / name, "no such file or folder")
            found[kind] = path
        return found

    def _every_file(self, folder: Path) -> Iterator[Path]:
        for path in self.find(folder).values():
            yield from sorted(path.iterdir()) if path.is_dir() else [path]

    def key(self, folder: Path | None) -> dict[str, Any]:
        """Return a key that identifies the data without reading it."""
        if folder is None and self.hub:
            return {"hub": self.hub, "revision": self.revision}
        states = [(*path.parts[-3:], path.stat()) for path in self._every_file(folder)]
        stamps = [(*names, state.st_size, state.st_mtime_ns) for *names, state in states]
        # Files of a folder may name others, as the lists of Pathfinder do.
        folders = [str(path.resolve()) for path in self.find(folder).values() if path.is_dir()]
        return {"files": key_hash({"stamps": stamps, "folders": folders})}

    def origin(self, folder: Path | None) -> dict[str, Any]:
        """Return the Hub's commit, or files with SHA-256 (of many files, their number and one)."""
        if folder is None:
            return self.key(folder)
        digests = [(path, sha256(path)) for path in self._every_file(folder)]
        if len(digests) <= _NAMED:
            return {"files": {path.name: digest for path, digest in digests}}
        listed = [(*path.parts[-3:], digest) for path, digest in digests]
        return {"files": len(listed), "sha256": key_hash({"files": listed}, digits=64)}

    def read(self, path: Path) -> bytes:
        """Read a file, unpacked if its name ends in .gz. Raises UserError where it is damaged."""
        data = read_bytes(path, limit=MAX_FILE_BYTES)
        try:
            return gzip.decompress(data) if path.suffix == ".gz" else data
        except (EOFError, OSError, zlib.error) as error:
            self.refuse(path, f"is truncated or no gzip file ({clipped(str(error))})")

    def rows(self, split: str) -> Any:
        """Return a split of the Hub's as a `datasets.Dataset`. Raises UserError."""
        import datasets

        return self._ask(
            lambda: datasets.load_dataset(self.hub, split=split, revision=self.revision)
        )

    def download(self, path: str) -> Path:
        """Return one of the Hub's files, downloaded once. Raises UserError."""
        from huggingface_hub import hf_hub_download

        how = {"revision": self.revision, "repo_type": "dataset"}
        return Path(self._ask(lambda: hf_hub_download(self.hub, path, **how)))

    def _ask(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except Exception as error:  # The libraries raise many kinds, network errors among them.
            local = f"DIR/{self.folders[0]}/{next(iter(self.files.values()))} and its companions"
            raise UserError(
                f"{self.hub} at {self.revision[:8]} cannot be had from the Hub "
                f"({reason_of(error)}); with files on this machine give --data DIR ({local})"
            ) from error


def _either(path: Path) -> Path | None:
    """Return the path, or that of the unpacked file; None if neither exists."""
    unpacked = path.with_name(path.name.removesuffix(".gz"))
    return next((each for each in (path, unpacked) if each.exists()), None)
