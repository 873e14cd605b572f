"""Checksums of files: many at once, each in a thread of its own.

xxh3_128 guards against damage, not against forgery, at several GB/s; SHA-256 stands where others
compare it too (shards, exported weights). Both let Python's other threads run meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import xxhash

from cat_lm.core.files import open_at_once

Algorithm = Literal["sha256", "xxh3_128"]
_MAKERS = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
_CHUNK = 1 << 22


def checksum(
    path: Path | str, algorithm: Algorithm, reading: Callable[[Path], object] = lambda path: None
) -> str:
    """Hash a file's bytes; returns lower-case hexadecimal digits. Raises OSError.

    Args:
        reading: called with the path each time that some MiB were hashed, in the calling thread;
            what it raises ends the hashing.
    """
    digest = _MAKERS[algorithm]()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0, opener=open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            reading(Path(path))
    return digest.hexdigest()


def sha256(path: Path | str) -> str:
    """Hash a file by SHA-256; returns lower-case hexadecimal digits. Raises OSError."""
    return checksum(path, "sha256")


def checksums(
    paths: Iterable[Path],
    algorithm: Algorithm,
    reading: Callable[[Path], object] = lambda path: None,
) -> dict[Path, str]:
    """Hash many files in as many threads as this process has cores.

    Args:
        reading: as in `checksum`, in the thread that hashes; the others then end, too.

    Raises:
        OSError: a file cannot be read.
    """
    paths = list(paths)
    stopped = threading.Event()

    def hashed(path: Path) -> str:
        return checksum(path, algorithm, progress)

    def progress(path: Path) -> None:
        if stopped.is_set():
            raise InterruptedError(errno.EINTR, "is no longer wanted", str(path))
        reading(path)

    with ThreadPoolExecutor(min(len(paths), len(os.sched_getaffinity(0))) or 1) as pool:
        try:
            return dict(zip(paths, pool.map(hashed, paths), strict=True))
        except BaseException:
            stopped.set()
            raise
