"""Shards that come from an address to this machine: read by range until a whole copy is here.

    CACHE/FINGERPRINT/         a prepared folder, as it fills up
      manifest.json tokenizer/
      train-00000.bin .idx     whole, and equal to the manifest's SHA-256
      .verified.jsonl          which ones were verified (see `cat_lm.data.verified`)
      .train-00000.lock        held by the process that copies it: ranks of a node share the copies

A copy grows under a temporary name and is renamed once its SHA-256 is right. Ranges cannot be
verified that way; their length is, and that their tokens are of the vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cat_lm.data.corpus import check_ids
from cat_lm.data.listed_shards import ListedShard
from cat_lm.data.manifest import open_shard
from cat_lm.data.shards import Shard
from cat_lm.data.storage import Storage
from cat_lm.data.verified import Listed, Notes, Stamp, shard_files
from cat_lm.errors import UserError
from cat_lm.io.checksums import sha256
from cat_lm.io.files import sync_directory
from cat_lm.io.locks import Busy, hold

CHUNK = 32 * 2**20


class RemoteShard(ListedShard):
    """A shard that may not be here yet: read by range until there is a copy."""

    def __init__(
        self, storage: Storage, folder: Path, entry: dict, manifest: dict, notes: Notes
    ) -> None:
        super().__init__(folder, entry, manifest["dtype"])
        self._storage = storage
        self._notes, self._files = notes, shard_files(folder, entry)
        self._vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self._local: Shard | None = None

    def is_cached(self) -> bool:
        """Tell whether a verified copy is on this machine."""
        if self._local is None and self._is_whole():
            self._local = open_shard(self._folder, self._entry, self.dtype.name)
        return self._local is not None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) in the dtype on disk, from the copy or by range."""
        if self.is_cached():
            return self._local.read(start, stop)
        size = self.dtype.itemsize
        try:
            data = self._storage.read(f"{self.name}.bin", start * size, stop * size)
        except FileNotFoundError:
            raise UserError(
                f"{self._address('.bin')}: no such file, but the manifest has it"
            ) from None
        tokens = np.frombuffer(data, self.dtype)
        check_ids(tokens, self._vocab_size, self._address(".bin"), start)
        return tokens

    def _whole(self) -> Shard:
        if not self.is_cached():
            self.copy(wait=True)
        return self._local

    def copy(self, wait: bool) -> bool:
        """Copies the shard here, unless it is; False where another process is just doing so.

        With `wait`, waits for that process instead.
        Raises `UserError` where the shard cannot be read or is not what the manifest says.
        """
        with locked(self._folder / f".{self.name}.lock", wait) as ours:
            if not ours:
                return False
            if not self.is_cached():
                self._notes.add([self._copy_file(file) for file in self._files])
        return self.is_cached()

    def _copy_file(self, file: Listed) -> Stamp:
        """Copies a file unless it is here already; returns what is to be noted of it."""
        path, suffix = file.path, file.path.suffix
        # Left by a process that was killed before it could note it, or changed since.
        if path.is_file():
            stamp = file.stamp()
            if sha256(path) == file.sha256:
                return stamp
        temporary = self._folder / f".{path.name}.tmp"  # of the one that holds the shard's lock
        try:
            if self._download(path.name, suffix, temporary) != file.sha256:
                raise UserError(
                    f"{self._address(suffix)}: its SHA-256 is not the manifest's; the file is "
                    "damaged or was replaced"
                )
            os.replace(temporary, path)
            sync_directory(self._folder)
        finally:
            temporary.unlink(missing_ok=True)
        return file.stamp()

    def _download(self, name: str, suffix: str, temporary: Path) -> str:
        """Writes the file to `temporary`, a chunk at a time; returns its SHA-256."""
        size = self.num_tokens * self.dtype.itemsize
        found = hashlib.sha256()
        with open(temporary, "wb") as stream:
            for data in self._chunks(name, size if suffix == ".bin" else None):
                stream.write(data)
                found.update(data)
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

    def _is_whole(self) -> bool:
        """Tell whether both files are as they were when they were verified."""
        return all(self._notes.holds(file) for file in self._files)


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock file; give whether it is held. Raises UserError where there are no locks."""
    try:
        lock = hold(path, wait=wait)
    except Busy:
        yield False
        return
    with lock:
        if lock.error is not None:
            raise UserError(
                f"data.cache_dir: {path.parent} has no file locks ({lock.error.strerror}), which "
                "ranks need to share copies; name a folder on a local disk"
            )
        yield True
