"""Errors that a user can mend, and the one place that turns them into an exit code."""

from __future__ import annotations

import errno
import functools
import os
import sys
import time
from collections.abc import Callable

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}
_DISK_ERRORS |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


class UserError(Exception):
    """Bad input: the message names the key or file, the value, and what would be right."""


class SharedError(UserError):
    """Raised on every rank alike; the first one speaks for all."""


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps a command's `main`: a `UserError` becomes one line on stderr and exit code 2.

    So does a disk that is full or not writable. What all ranks share, the first one prints. Ends
    quietly with code 130 on Ctrl-C, and when the reader of a pipe has gone.
    """

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except UserError as error:
            if isinstance(error, SharedError) and os.environ.get("RANK", "0") != "0":
                time.sleep(
                    2
                )  # launchers end all ranks with the first that leaves, even in mid-word
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
            if error.errno not in _DISK_ERRORS:
                raise
            where = f"{error.filename}: " if error.filename else ""
            print(f"error: {where}{error.strerror}", file=sys.stderr)
            raise SystemExit(2) from None

    return run
