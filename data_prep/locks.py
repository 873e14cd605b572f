"""Locks that the kernel releases when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_noted = False


class Busy(Exception):
    """Someone else holds the lock."""


@contextmanager
def file_lock(path: Path, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Holds the lock that the file at `path` stands for; the file stays.

    `shared`: together with other holders of the kind. Raises `Busy` where another has it and `wait`
    is false. A file system that knows no locks is noted, and the lock then holds nobody back (the
    value is False): what is written under it must be safe without it, if perhaps done twice.
    """
    with open(path, "a") as stream:
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        real = True
        try:
            fcntl.flock(stream, mode)
            # The holder before may have removed the file that was opened above.
            ours = path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat())
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise Busy from None
            _note(path.parent, error)
            ours, real = True, False
        if not ours and not wait:
            raise Busy
        yield real


def _note(folder: Path, error: OSError) -> None:
    global _noted
    if not _noted:
        _noted = True
        print(
            f"note: {folder}: no file locks here ({error.strerror}); what is done stays whole, "
            "but start no two preparations into one folder, they would do the work twice",
            file=sys.stderr,
        )
