"""Shards that come from an address to this machine: copied whole before they are read.

    CACHE/FINGERPRINT/         a prepared folder, as it fills up
      manifest.json tokenizer/
      train-00000.bin .idx     whole, and equal to the manifest's SHA-256
      .verified.jsonl          which ones were verified (see `cat_lm.data.verified`)
      .train-00000.lock        held by the process that copies it: ranks of a node share the copies

A copy grows under a temporary name and is renamed once its SHA-256 is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256, sync_directory
from cat_lm.core.folders import hold_patiently
from cat_lm.data.listed_shards import ListedShard
from cat_lm.data.manifest import open_shard
from cat_lm.data.shards import Shard
from cat_lm.data.storage import Storage
from cat_lm.data.verified import Listed, Notes, Stamp, shard_files

CHUNK = 32 * 2**20


class RemoteShard(ListedShard):
    """A shard that may not be here yet, and is copied before it is read."""

    def __init__(
        self, storage: Storage, folder: Path, entry: dict, manifest: dict, notes: Notes
    ) -> None:
        super().__init__(folder, entry, manifest["dtype"])
        self._storage = storage
        self._notes, self._files = notes, shard_files(folder, entry)

    def is_cached(self) -> bool:
        """Return True if both files are here as they were when they were verified."""
        return all(self._notes.holds(file) for file in self._files)

    def copy(self, progress: Callable[[str], object] = lambda what: None) -> None:
        """Copy the shard here, or wait for the process that does so.

        Args:
            progress: told of the file that is copied, each time that some of it came.

        Raises:
            UserError: the shard cannot be read or is not what the manifest says.
            ConnectionError: the storage stays out of reach.
        """
        with alone(self._folder / f".{self.name}.lock", progress):
            if not self.is_cached():
                self._notes.add([self._copy_file(file, progress) for file in self._files])

    @cached_property
    def _opened(self) -> Shard:
        if not self.is_cached():
            self.copy()
        return open_shard(self._folder, self._entry, self.dtype.name)

    def _copy_file(self, file: Listed, progress: Callable[[str], object]) -> Stamp:
        """Copies a file unless it is here already; returns what is to be noted of it."""
        path, suffix = file.path, file.path.suffix
        # Left by a process that was killed before it could note it, or changed since.
        if path.is_file():
            stamp = file.stamp()
            if sha256(path) == file.sha256:
                return stamp
        temporary = self._folder / f".{path.name}.tmp"  # of the one that holds the shard's lock
        try:
            if self._download(path.name, suffix, temporary, progress) != file.sha256:
                raise UserError(
                    f"{self._address(suffix)}: its SHA-256 is not the manifest's; the file is "
                    "damaged or was replaced"
                )
            os.replace(temporary, path)
            sync_directory(self._folder)
        finally:
            temporary.unlink(missing_ok=True)
        return file.stamp()

    def _download(
        self, name: str, suffix: str, temporary: Path, progress: Callable[[str], object]
    ) -> str:
        """Writes the file to `temporary`, a chunk at a time; returns its SHA-256."""
        size = self.num_tokens * self.dtype.itemsize
        found = hashlib.sha256()
        with open(temporary, "wb") as stream:
            for data in self._chunks(name, size if suffix == ".bin" else None):
                stream.write(data)
                found.update(data)
                progress(f"copying {self._storage.url}/{name}")
            stream.flush()
            os.fsync(stream.fileno())
        return found.hexdigest()

    def _chunks(self, name: str, size: int | None) -> Iterator[bytes]:
        try:
            if size is None:  # an index: small, and its size is not in the manifest
                yield self._storage.read(name)
                return
            for start in range(0, size, CHUNK):
                yield self._storage.read(name, start, min(start + CHUNK, size))
        except FileNotFoundError:
            raise UserError(
                f"{self._storage.url}/{name}: no such file, but the manifest has it"
            ) from None

    def _address(self, suffix: str) -> str:
        return f"{self._storage.url}/{self.name}{suffix}"


@contextlib.contextmanager
def alone(path: Path, progress: Callable[[str], object] = lambda what: None) -> Iterator[None]:
    """Hold a lock file, once its holder before is done. Raises UserError where no locks exist."""
    lock = hold_patiently(path, progress, "waiting for a copy that another process makes")
    with lock:
        if lock.error is not None:
            raise UserError(
                f"data.cache_dir: {path.parent} has no file locks ({lock.error.strerror}), which "
                "ranks need to share copies; name a folder on a local disk"
            )
        yield
