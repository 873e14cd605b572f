"""Prepared data at an address, such as s3://bucket/data, with copies on this machine.

The order of the windows is a shuffle of the whole corpus: the first batch already reads from
nearly every shard. So a run copies all shards before its first step (`fetch`), a few at a time and
once for all ranks of a host; whoever reads a shard that is not here yet copies it first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError, file_error
from cat_lm.core.files import atomic_write, sha256
from cat_lm.core.folders import empty_temporary, make_temporary, remove_temporary
from cat_lm.core.host import GIB
from cat_lm.data.corpus import TokenCorpus, allow_open_files
from cat_lm.data.manifest import MANIFEST, check_fingerprint, listed_shards, parse_manifest
from cat_lm.data.remote_shards import RemoteShard, alone
from cat_lm.data.shards import index_bytes
from cat_lm.data.storage import Storage, cache_folder
from cat_lm.data.verified import Notes

COPY_THREADS = 4
TOKENIZER = "tokenizer"
# What a tokenizer's folder may hold beside tokenizer.json; web servers cannot list theirs.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "sentencepiece.model",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def open_remote(url: str, split: str, cache_dir: Path | str | None = None) -> RemoteCorpus:
    """Opens a split of the prepared data at `url`; reads the manifest, and once the tokenizer.

    Raises `UserError` where there are no such data, access is refused, or the cache cannot hold
    them, and `ConnectionError` where the storage stays out of reach.
    """
    storage = Storage(url)
    try:
        text = storage.read(MANIFEST)
    except FileNotFoundError:
        raise UserError(f"{url}: holds no finished data (no {MANIFEST})") from None
    manifest = parse_manifest(text, f"{storage.url}/{MANIFEST}")
    check_fingerprint(manifest, storage.url)  # it names the folder of the copies
    folder = cache_folder(cache_dir) / manifest["fingerprint"][:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, manifest)
        with atomic_write(folder / MANIFEST, "wb") as stream:
            stream.write(text)
        _copy_tokenizer(storage, folder, manifest["tokenizer"]["sha256"])
    except ConnectionError:
        raise
    except OSError as error:
        raise file_error(f"data.cache_dir: {folder}: {error.strerror or error}", error) from error
    return RemoteCorpus(storage, folder, split, manifest)


class RemoteCorpus(TokenCorpus):
    """A `TokenCorpus` whose shards are copied to this machine before they are read."""

    def __init__(self, storage: Storage, folder: Path, split: str, manifest: dict) -> None:
        self._storage = storage
        super().__init__(folder, split, manifest, name=storage.url)

    def _open_shards(self, listed: list[dict]) -> list[RemoteShard]:
        allow_open_files(len(listed))
        notes = Notes(self.folder)
        return [RemoteShard(self._storage, self.folder, e, self.manifest, notes) for e in listed]

    def entries_here(self) -> list[dict]:
        """None: what comes here is verified as it comes."""
        return []

    def fetch(self, progress: Callable[[str], object] = lambda what: None) -> None:
        """Copy all shards here that are not.

        Raises:
            UserError: a shard cannot be read or is not what the manifest says.
            ConnectionError: the storage stays out of reach.
        """
        missing = [shard for shard in self.shards if not shard.is_cached()]
        pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix=f"copy-{self.split}")
        try:
            for copied in as_completed([pool.submit(shard.copy, progress) for shard in missing]):
                copied.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def describe(self) -> list[str]:
        here = sum(shard.is_cached() for shard in self.shards)
        line = f"{self.name}: {here:,} of {len(self.shards):,} shards are in {self.folder}"
        if here < len(self.shards):
            line += "; the others are copied there before they are read"
        return [*super().describe(), line]


def _check_space(folder: Path, manifest: dict) -> None:
    size = np.dtype(manifest["dtype"]).itemsize
    needed = 0
    for shard in listed_shards(manifest):
        bin_size, idx_size = shard["tokens"] * size, index_bytes(shard["documents"])
        for name, expected in ((".bin", bin_size), (".idx", idx_size)):
            path = folder / f"{shard['name']}{name}"
            needed += expected - (min(expected, path.stat().st_size) if path.exists() else 0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"data.cache_dir: {folder} has {free / GIB:.1f} GiB free, the data need "
            f"{needed / GIB:.1f} GiB more; name a folder on a larger disk"
        )


def _copy_tokenizer(storage: Storage, folder: Path, digest: str) -> None:
    if (folder / TOKENIZER).is_dir():
        return
    with alone(folder / f".{TOKENIZER}.lock"):
        if (folder / TOKENIZER).is_dir():
            return
        temporary = folder / f".{TOKENIZER}.{socket.gethostname()}.tmp"
        make_temporary(temporary)
        try:
            empty_temporary(temporary)  # what a process left that was killed
            made = temporary / TOKENIZER
            made.mkdir()
            for name in ("tokenizer.json", *TOKENIZER_FILES):
                with contextlib.suppress(FileNotFoundError):
                    (made / name).write_bytes(storage.read(f"{TOKENIZER}/{name}"))
            main = made / "tokenizer.json"
            if not main.is_file() or sha256(main) != digest:
                what = "is not the manifest's" if main.is_file() else "is missing"
                raise UserError(f"{storage.url}/{TOKENIZER}/tokenizer.json: {what}")
            os.rename(made, folder / TOKENIZER)
        finally:
            remove_temporary(temporary)
