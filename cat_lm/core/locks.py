"""Locks that the kernel releases when their holder ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from cat_lm.core.errors import UserError

WAIT_SECONDS = 0.2  # between looks whether another holder is done


class Busy(Exception):
    """Another process holds the lock."""


class Lock:
    """A lock that is held: until `close`, as a file is, or until all processes that have it end.

    Attributes:
        error: of a file system that knows no locks; the lock then holds nobody back, and what is
            done under it must be safe without it.
    """

    def __init__(self, descriptor: int, error: OSError | None) -> None:
        self._descriptor = descriptor
        self.error = error

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the open descriptor, for a child process to inherit."""
        return self._descriptor

    def close(self) -> None:
        """Release the lock; more than once changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def hold(path: Path, *, shared: bool = False, wait: bool = True) -> Lock:
    """Take the lock that a folder or a file stands for; the file is made where it is not there.

    Args:
        shared: together with other holders of the kind.
        wait: until another's lock ends.

    Raises:
        Busy: another holds it, and `wait` is false.
        OSError: the file cannot be opened.
        UserError: it is a link; a file elsewhere is not made, nor held.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        try:
            descriptor = os.open(str(path), flags | os.O_NOFOLLOW, 0o666)
        except OSError:
            if path.is_symlink():
                raise UserError(
                    f"{path}: is a link, must be a lock's own file; remove it"
                ) from None
            raise
        try:
            fcntl.flock(descriptor, kind)
            # The holder before may have removed or renamed what was opened above.
            same = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise Busy from None
            return Lock(descriptor, error)
        except BaseException:
            os.close(descriptor)
            raise
        if same:
            return Lock(descriptor, None)
        os.close(descriptor)
        if not wait:
            raise Busy


def hold_patiently(path: Path, progress: Callable[[str], object], what: str) -> Lock:
    """Take a lock as soon as nobody else has it, and tell meanwhile `what` is waited for."""
    while True:
        try:
            return hold(path, wait=False)
        except Busy:
            progress(what)
            time.sleep(WAIT_SECONDS)
