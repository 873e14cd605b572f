"""Prepared data at an address, such as s3://bucket/data, with copies on this machine.

    CACHE/FINGERPRINT/         a prepared folder, as it fills up
      manifest.json tokenizer/
      train-00000.bin .idx     complete files with the manifest's SHA-256
      .verified.jsonl          the files that were verified (see `cat_lm.data.verified`)
      .copying.lock            held while a process copies: ranks of a host share the copies

The windows of the whole corpus are shuffled, so that the first batch already reads from nearly
every shard. A run therefore copies all shards before its first step (`fetch`); any other reader
copies a shard when it first reads it. A copy is written under a temporary name, and renamed when
its SHA-256 is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError, reason_of, retrying, status_of
from cat_lm.core.files import atomic_write, sha256
from cat_lm.core.folders import wait_for_lock
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import MANIFEST, check_fingerprint, parse_manifest
from cat_lm.data.verified import Notes, cache_folder, note_files, shard_digests

COPY_THREADS = 4
CHUNK = 32 * 2**20
# The tokenizer files that `data_prep` writes, because web servers cannot list folders.
TOKENIZER_FILES = ("tokenizer_config.json", "sentencepiece.model", "tokenizer.json")

Progress = Callable[[str], object]
_log = logging.getLogger(__name__)

# The attempts take about four minutes; after longer outages the job is requeued.
ATTEMPTS = 10
# If no server answers for the manifest, the address is probably wrong.
FIRST_ATTEMPTS = 2
# Parts of the names of errors that libraries raise for refused access, which is not retried.
_REFUSALS = re.compile("Credentials|TokenRetrieval|GatedRepo|RefreshError")


def open_remote(url: str, split: str, cache_dir: Path | str | None = None) -> RemoteCorpus:
    """Open a split of the prepared data at `url`, and copy the manifest and the tokenizer.

    Raises `UserError` if there are no data or access is refused, `ConnectionError` if the storage
    cannot be reached, and `OSError` for errors of the cache.
    """
    storage = Storage(url)
    try:
        text = storage.read(MANIFEST)
    except FileNotFoundError:
        raise UserError(f"{url}: holds no finished data (no {MANIFEST})") from None
    manifest = parse_manifest(text, f"{storage.url}/{MANIFEST}")
    check_fingerprint(manifest, storage.url)  # The fingerprint names the folder of the copies.
    folder = cache_folder(cache_dir) / manifest["fingerprint"][:32]
    tokenizer = folder / "tokenizer/tokenizer.json"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    _write(folder / MANIFEST, text)
    if not (tokenizer.is_file() and sha256(tokenizer) == manifest["tokenizer"]["sha256"]):
        for name in TOKENIZER_FILES:
            with contextlib.suppress(FileNotFoundError):
                _write(tokenizer.with_name(name), storage.read(f"tokenizer/{name}"))
    return RemoteCorpus(storage, folder, split, manifest)


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path, "wb") as stream:
        stream.write(content)


class RemoteCorpus(TokenCorpus):
    """A `TokenCorpus` whose shards are copied to this machine before they are read."""

    def __init__(self, storage: Storage, folder: Path, split: str, manifest: dict) -> None:
        self._storage = storage
        super().__init__(folder, split, manifest, storage.url, bring=self._copy)

    def fetch(self, progress: Progress = lambda what: None) -> None:
        """Copy all missing shards to this machine, or wait for the process that copies them.

        Raises UserError for a shard that differs from the manifest, and as `Storage.read` does.
        """
        self._copy(self.entries, progress)

    def missing(self, entries: list[dict]) -> list[dict]:
        """Return the entries whose local copies are missing or were changed after copying."""
        notes = Notes(self.folder)
        return [entry for entry in entries if not notes.all_verified(shard_digests(entry))]

    def describe(self) -> list[str]:
        return [*super().describe(), f"{self.name}: its copies are in {self.folder}"]

    def _copy(self, entries: list[dict], progress: Progress = lambda what: None) -> None:
        if not self.missing(entries):
            return
        what = "waiting for a copy that another process makes"
        with wait_for_lock(self.folder / ".copying.lock", progress, what) as lock:
            # With the lock held, temporary files belong to killed processes.
            for left in () if lock.error else self.folder.glob(".*.bin.*.tmp"):
                left.unlink(missing_ok=True)
            pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix=f"copy-{self.split}")
            try:
                missing = self.missing(entries)  # Another process may have copied some.
                copies = [pool.submit(self._copy_shard, entry, progress) for entry in missing]
                for copied in as_completed(copies):
                    copied.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _copy_shard(self, entry: dict, progress: Progress) -> None:
        for name, digest in shard_digests(entry).items():
            path = self.folder / name
            if (
                path.is_file() and sha256(path) == digest
            ):  # It was moved here, or a kill came before its note.
                continue
            found = hashlib.sha256()
            with atomic_write(path, "wb") as stream:
                for data in self._chunks(entry, name):
                    stream.write(data)
                    found.update(data)
                    progress(f"copying {self.name}/{name}")
                if found.hexdigest() != digest:
                    raise UserError(
                        f"{self.name}/{name}: its SHA-256 is not the manifest's; the file is "
                        "damaged or was replaced"
                    )
        note_files(self.folder, shard_digests(entry))

    def _chunks(self, entry: dict, name: str) -> Iterator[bytes]:
        size = entry["tokens"] * np.dtype(self.manifest["dtype"]).itemsize
        try:
            if name.endswith(".idx"):  # It is small, and the manifest does not have its size.
                yield self._storage.read(name)
                return
            for start in range(0, size, CHUNK):
                yield self._storage.read(name, start, min(start + CHUNK, size))
        except FileNotFoundError:
            raise UserError(f"{self.name}/{name}: no such file, but the manifest has it") from None


class Storage:
    """A folder at an address. Raises `UserError` if no installed library reads such addresses."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self._fs, self._root = url_to_fs(self.url)
        except Exception as error:  # Every storage library raises classes of its own.
            if _is_refusal(error):
                raise self._refusal("", error) from error
            raise UserError(f"{url}: cannot be read here ({reason_of(error)})") from error

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a file, or all of them; temporary failures are retried.

        Raises:
            FileNotFoundError: there is no such file.
            UserError: access is refused, no server answers, or the server cannot send ranges.
            ConnectionError: every attempt failed; it is a transient error, after which a run is
                started again.
        """
        place = f"{self.url}/{name}"

        def fetch() -> bytes:
            data = self._fs.cat_file(f"{self._root}/{name}", start=start, end=stop)
            if start is not None and len(data) > stop - start:
                raise UserError(f"{place}: the server sends whole files only; copy the folder here")
            if start is not None and len(data) < stop - start:
                raise OSError(f"{len(data)} bytes came for a range of {stop - start}")
            return data

        def failure(error: Exception, attempt: int) -> Exception | None:
            if isinstance(error, (FileNotFoundError, UserError)):
                return error
            if _is_refusal(error):
                return self._refusal(f"/{name}", error)
            reason = reason_of(error)
            if name == MANIFEST and attempt == FIRST_ATTEMPTS and _has_no_server(error):
                return UserError(f"{place}: nothing answers at this address ({reason})")
            if attempt < ATTEMPTS:
                return None
            return ConnectionError(f"{place}: could not be read in {ATTEMPTS} attempts ({reason})")

        def note(error: Exception, attempt: int, wait: float) -> None:
            _log.warning("%s: %s; again in %.1f s", place, reason_of(error), wait)

        return retrying(fetch, failure, note)

    def _refusal(self, place: str, error: Exception) -> UserError:
        return UserError(
            f"{self.url}{place}: access is refused ({reason_of(error)}); give this process "
            "credentials the way the storage's own tools take them (environment or login)"
        )


def _is_refusal(error: Exception) -> bool:
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    refused = isinstance(error, PermissionError) or bool(_REFUSALS.search(names))
    return refused or status_of(error) in (401, 403)


def _has_no_server(error: BaseException | None) -> bool:
    """Return True if the host of a request is unknown or accepts no connections."""
    kinds, seen = (socket.gaierror, ConnectionRefusedError), []
    while error is not None and error not in seen:
        if isinstance(error, kinds) or isinstance(getattr(error, "os_error", None), kinds):
            return True  # aiohttp keeps the original error in `os_error`.
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
