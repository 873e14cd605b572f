"""Errors that a user can mend, and the one place that turns them into an exit code."""

from __future__ import annotations

import errno
import functools
import os
import sys
import time
from collections.abc import Callable

# Without a file's name these still speak of files; other errors may be of sockets or processes.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}
_DISK_ERRORS |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ELOOP: "a loop of symbolic links",
    errno.ENAMETOOLONG: "a name is longer than 255 bytes, or the path longer than 4,095",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
}


class UserError(Exception):
    """Bad input: the message names the key or file, the value, and what would be right."""


class SharedError(UserError):
    """Raised on every rank alike; the first one speaks for all."""


def describe_os_error(error: OSError) -> str:
    """Say in a few words why a file could not be opened, read or written."""
    return _REASONS.get(error.errno) or error.strerror or str(error)


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps a command's `main`: a `UserError` becomes one line on stderr and exit code 2.

    So does a file or a disk that cannot be read or written. What all ranks share, the first one
    prints. Ends quietly with code 130 on Ctrl-C, and when the reader of a pipe has gone.
    """

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except UserError as error:
            if isinstance(error, SharedError) and os.environ.get("RANK", "0") != "0":
                # Launchers end all ranks with the first that leaves, even in mid-word.
                time.sleep(2)
            else:
                print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:
            # Without this, the interpreter complains again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except OSError as error:
            if error.filename is None and error.errno not in _DISK_ERRORS:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            print(f"error: {where}{describe_os_error(error)}", file=sys.stderr)
            raise SystemExit(2) from None
        except RuntimeError as error:
            # What pathlib raises where a path is resolved, up to Python 3.12.
            if not str(error).startswith("Symlink loop from "):
                raise
            path = str(error).removeprefix("Symlink loop from ").strip("'")
            print(f"error: {path}: {_REASONS[errno.ELOOP]}", file=sys.stderr)
            raise SystemExit(2) from None

    return run
