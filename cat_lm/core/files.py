"""Files that are either whole or absent: atomic replacement, appending, flushes to disk."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from cat_lm.core.errors import UserError, describe_os_error, file_error

_PIECE = 1 << 22
# What only a write can meet; a read inside of `naming` may be of another file.
_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def open_at_once(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`: a pipe does not wait for somebody who writes to it.

    Raises:
        OSError: as `os.open`; a socket is named as such.
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "is a socket or a device, not a file", str(path)) from None


@contextmanager
def atomic_write(path: Path | str, mode: str = "w") -> Iterator[IO]:
    """Opens a temporary file beside `path`; on success it is flushed to disk and renamed to it.

    On any error the temporary file is removed and `path` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = None if "b" in mode else "utf-8"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
    try:
        with naming(path), os.fdopen(handle, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        give_usual_mode(Path(name))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name the file in the error of a full disk, which a write inside does not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITE_ERRORS:
            error.filename = str(path)
        raise


class AppendedFile:
    """A file that only grows, by whole pieces.

    A write that fails does not raise: several ranks must end together. It is kept as `error`,
    nothing of it stays in the file, and nothing more is written.

    Where the file is removed or renamed meanwhile, writing continues under its name.

    Attributes:
        error: what the user must know of the first failure, or None.
    """

    def __init__(self, path: Path | str, say: Callable[[str], object] = lambda line: None) -> None:
        """Open `path`. Raises UserError where it is a link: a file elsewhere does not grow.

        Args:
            say: gets a line when the file was removed or renamed.
        """
        self.error: UserError | None = None
        self._path, self._say = Path(path), say
        self._open()

    def _open(self) -> None:
        if self._path.is_symlink():
            raise UserError(f"{self._path}: is a link, must be a run's own file; remove it")
        # Without a buffer: it would be written again, and fail again, whenever it is let go.
        self._stream = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        self._own = os.fstat(self._stream.fileno())
        self._size = self._own.st_size

    def write(self, data: bytes) -> None:
        """Appends `data` and hands it to the system."""
        if self.error is None:
            self._try(lambda: self._append(data))

    def sync(self) -> None:
        """Flushes to disk."""
        if self.error is None:
            self._try(lambda: (self._keep_name(), os.fsync(self._stream.fileno())))

    def close(self) -> None:
        if self.error is None:
            self._try(self._keep_name)
        self._try(self._stream.close)

    def _append(self, data: bytes) -> None:
        self._keep_name()
        self._put(data)

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:  # on a disk that is nearly full the system writes a part
            left = left[self._stream.write(left) :]
        self._size += len(data)

    def _keep_name(self) -> None:
        """Write to the file's name again where it no longer leads to what is written.

        What was written before is copied there from the open file, unless it is still in the
        folder under another name, or another file is there already.
        """
        try:
            found = os.stat(self._path)
            if os.path.samestat(found, self._own):
                # Another process may have cut it short, as log rotation by copying does.
                self._size = found.st_size
                return
        except FileNotFoundError:
            pass
        except OSError:  # Nothing can be told for a while; the open file may still be written to.
            return
        self._path.parent.mkdir(exist_ok=True)
        # NFS keeps a file that was removed while it is open under a name of its own.
        renamed = [
            entry.name
            for entry in os.scandir(self._path.parent)
            if entry.inode() == self._own.st_ino and not entry.name.startswith(".nfs")
        ]
        old = self._stream
        self._open()
        with old:
            if renamed:
                how = f"was renamed to {renamed[0]}; what follows is in a new file"
            elif self._size:
                how = "was replaced by another file; what follows is appended to that one"
            else:
                how = "was removed; it is written again with all that it held"
                old.seek(0)
                while piece := old.read(_PIECE):
                    self._put(piece)
        self._say(f"{self._path}: {how}")

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UserError as error:  # there is a link in the file's place
            self.error = error
        except OSError as error:
            text = f"{self._path}: {describe_os_error(error)}"
            self.error = self.error or file_error(text, error)
            with suppress(OSError):
                self._stream.truncate(self._size)
            with suppress(OSError):
                self._stream.close()


def write_text(path: Path | str, text: str) -> None:
    """Writes `text` atomically."""
    with atomic_write(path) as stream:
        stream.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Writes `value` atomically as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def finite(value: Any) -> Any:
    """Return what JSON can hold of a value: None for NaN and infinities, in lists and objects."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_directory(path: Path | str) -> None:
    """Flushes a directory's entries, so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def give_usual_mode(path: Path) -> None:
    """Set the permissions that a newly made file or folder has, by the process's umask.

    Temporary files and those of safetensors are made for their owner alone, copies keep what the
    original had.
    """
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
