"""Files that are either whole or absent: atomic replacement, appending, checksums."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from cat_lm.core.errors import UserError, describe_os_error, file_error

# xxh3_128 finds damaged files at several GB/s. SHA-256 is for files that other programs compare as
# well (shards, exported weights). Both release Python's lock while they compute.
Algorithm = Literal["sha256", "xxh3_128"]
SEAL = "record_sha256"  # the key of a record's own checksum
_PIECE = 1 << 22
# Only writes raise these errors; others inside of `atomic_write` may belong to another file.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def atomic_write(path: Path | str, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    It is flushed to disk and renamed. After an error it is removed, and `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = None if "b" in mode else "utf-8"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        give_usual_mode(Path(name))
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno in _DISK_FULL:
            error.filename = str(path)
        raise
    sync_directory(path.parent)


class AppendedFile:
    """A file that is only appended to, in whole pieces, and is written again when it is removed.

    A failed write does not raise, since all ranks must end together. `error` then holds the first
    error, the file keeps nothing of the piece, and nothing more is written.
    """

    def __init__(self, path: Path | str, log: Callable[[str], object] = lambda line: None) -> None:
        """Open `path`; `log` is called with a line when the file was removed or replaced.

        Raises UserError where `path` is a link, since a run appends only to a file of its own.
        """
        self.error: UserError | None = None
        self._path, self._log = Path(path), log
        self._stream = self._open()

    def _open(self) -> io.FileIO:
        if self._path.is_symlink():
            raise UserError(f"{self._path}: is a link, must be a run's own file; remove it")
        # Unbuffered: after a failure, a buffer would be written again when the file is closed.
        return io.FileIO(self._path, "a+")

    def write(self, data: bytes) -> None:
        """Append `data` and hand it to the system."""
        self._try(lambda: self._append(data))

    def sync(self) -> None:
        """Flush the file to disk."""
        self._try(lambda: os.fsync(self._stream.fileno()))

    def close(self) -> None:
        """Close the file."""
        self._try(lambda: self._stream.close())

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._stream.fileno()).st_size
        left = memoryview(data)
        try:
            while left:  # A disk that is nearly full takes only a part.
                left = left[self._stream.write(left) :]
        except OSError:
            with suppress(OSError):
                self._stream.truncate(size)
            raise

    def _keep_name(self) -> None:
        """Reopen the path if it no longer names the open file, and copy the old content into it."""
        opened = os.fstat(self._stream.fileno())
        try:
            if os.path.samestat(os.stat(self._path), opened):
                return
        except FileNotFoundError:
            self._path.parent.mkdir(exist_ok=True)
        except OSError:  # The path cannot be looked up now: keep writing to the open file.
            return
        with self._stream as old:
            self._stream = self._open()
            how = "was replaced by another file; what follows is appended to that one"
            if not os.fstat(self._stream.fileno()).st_size:
                how = "was removed or renamed; it is written again with all that it held"
                old.seek(0)
                while piece := old.read(_PIECE):
                    self._append(piece)
        self._log(f"{self._path}: {how}")

    def _try(self, action: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            self._keep_name()
            action()
        except UserError as error:  # The path is a link now.
            self.error = error
        except OSError as error:
            self.error = file_error(f"{self._path}: {describe_os_error(error)}", error)
            with suppress(OSError):  # On NFS, closing reports the failed write again.
                self._stream.close()


def write_text(path: Path | str, text: str) -> None:
    """Write `text` atomically."""
    with atomic_write(path) as stream:
        stream.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` atomically as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def replace_nonfinite(value: Any) -> Any:
    """Return a value with None for every NaN and infinity in it, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """Write a record and the checksum of its values atomically as JSON."""
    stored = json.loads(json.dumps(record))  # the keys and lists as they will be read
    write_json(path, {**stored, SEAL: _seal(stored)})


def unseal(record: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a record without its checksum, and True if the checksum matches its values."""
    record = dict(record)
    seal = record.pop(SEAL, None)
    return record, seal == _seal(record)


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def checksum(
    path: Path | str, algorithm: Algorithm, reading: Callable[[Path], object] = lambda path: None
) -> str:
    """Hash a file's bytes; returns lower-case hexadecimal digits. Raises OSError.

    `reading` is called with the path after every 4 MiB, and may raise to stop.
    """
    if algorithm == "sha256":
        digest = hashlib.sha256()
    else:
        import xxhash  # imported here because `launch.doctor` may find it missing

        digest = xxhash.xxh3_128()
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
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
    """Hash many files as `checksum` does, in as many threads as this process has cores."""
    paths = list(paths)
    with ThreadPoolExecutor(min(len(paths), len(os.sched_getaffinity(0))) or 1) as pool:
        found = pool.map(lambda path: checksum(path, algorithm, reading), paths)
        return dict(zip(paths, found, strict=True))


def sync_directory(path: Path | str) -> None:
    """Flush a directory's entries, so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def give_usual_mode(path: Path) -> None:
    """Set the permissions that a new file or folder gets from the process's umask.

    Temporary files, copies and the files that safetensors writes have others.
    """
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def os_error(error: Exception, path: Path | str) -> OSError | None:
    """Return the OSError behind a library's error on a file; None where there is none.

    safetensors, torch and `shutil.copytree` report its number only in their text. The number
    decides whether the error is transient, and with what code a command ends.
    """
    if isinstance(error, OSError) and error.errno is not None:
        error.filename = error.filename or str(path)
        return error
    text = str(error)
    for number in map(int, re.findall(r"(\d+)[)\]]", text)):  # (os error 28), [Errno 28] or (28)
        if number in errno.errorcode and os.strerror(number) in text:
            return OSError(number, os.strerror(number), str(path))
    if isinstance(error, FileNotFoundError):  # safetensors raises it for any failure to open.
        try:
            open(path, "rb").close()
        except OSError as found:
            return found
        return OSError(errno.EAGAIN, "could not be opened, and now can be", str(path))
    return None


@contextmanager
def raising_os_errors(path: Path | str) -> Iterator[None]:
    """Replace a library's error inside of the block by the OSError behind it, with a file name."""
    try:
        yield
    except Exception as error:
        cause = os_error(error, path)
        if cause is None or cause is error:
            raise
        raise cause from error
