"""Errors that a user can fix, transient errors, and the exit codes of both."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

# EX_TEMPFAIL of sysexits.h: the input is right, and launchers start the same command again.
REQUEUE_EXIT_CODE = 75
# Writes to an open stream raise these errors without a file's name.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# Transient errors of file systems and networks of many machines: a server that restarts, a client
# that was evicted, a cable.
_PASSING = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ENOLINK}
_PASSING |= {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_PASSING |= {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN}
_PASSING |= {errno.ESHUTDOWN, errno.EREMOTEIO, errno.ECOMM}
_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.EACCES: "no permission",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ENOSPC: "the disk is full",
}


class UserError(Exception):
    """Bad input: the message names the key or file, the value, and what would be right."""


class TemporaryError(UserError):
    """A transient problem, which may be gone when the same command is started again."""


class SharedError(UserError):
    """An error that every rank raises alike, so that only rank 0 prints it."""


class SharedTemporaryError(SharedError, TemporaryError):
    """A transient error that every rank raises alike."""


def is_temporary(error: BaseException) -> bool:
    """Return True if an error is transient: the same command may succeed when started again."""
    if isinstance(error, OSError):
        return error.errno in _PASSING or isinstance(error, (ConnectionError, TimeoutError))
    return isinstance(error, TemporaryError)


def file_error(text: str, error: OSError) -> UserError:
    """Return a UserError with this text for an OSError on a file, temporary if it is transient."""
    return TemporaryError(text) if is_temporary(error) else UserError(text)


def shared_error(text: str, temporary: bool) -> SharedError:
    """Return the error that all ranks raise, with this text."""
    return SharedTemporaryError(text) if temporary else SharedError(text)


def describe_os_error(error: OSError) -> str:
    """Describe in a few words why a file could not be opened, read or written."""
    return _REASONS.get(error.errno) or error.strerror or str(error)


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a command's `main`: a `UserError` becomes one line on stderr and exit code 2.

    A file or a disk that cannot be read or written has the same code. Transient errors end with
    `REQUEUE_EXIT_CODE`, Ctrl-C with 130, and a pipe without a reader with 1. Rank 0 prints an error
    that all ranks share. A process that is one of several ranks ends by `hard_exit`.
    """

    @functools.wraps(main)
    def run() -> None:
        try:
            _run(main)
        except BaseException as error:
            if not _among_ranks():
                raise
            if not isinstance(error, SystemExit):
                traceback.print_exc()
                hard_exit(1)
            hard_exit(error.code if isinstance(error.code, int) else int(error.code is not None))

    return run


def _run(main: Callable[[], None]) -> None:
    try:
        _prepare_streams()
        try:
            main()
        except SystemExit:
            sys.stdout.flush()
            raise
        # Where this fails at exit, the interpreter ends with code 120 and a message of its own.
        sys.stdout.flush()
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except BrokenPipeError:
        _discard_pending()
        raise SystemExit(1) from None
    except (UserError, OSError) as error:
        code = REQUEUE_EXIT_CODE if is_temporary(error) else 2
        if isinstance(error, SharedError) and launched_rank() != "0":
            # Launchers end all ranks when the first one leaves: let rank 0 finish its line.
            time.sleep(2)
            raise SystemExit(code) from None
        line = str(error)
        if isinstance(error, OSError):
            where = error.filename
            if where is None and error.errno in _DISK_ERRORS:
                where = "standard output"
            elif where is None and code == 2:  # The error is of no file and no connection.
                raise
            line = f"{where or type(error).__name__}: {describe_os_error(error)}"
        _end(f"error: {line}", code)


def launched_rank() -> str:
    """Return the rank that torchrun, deepspeed or srun gave this process; "0" without them."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"


def _among_ranks() -> bool:
    group = sys.modules.get("torch.distributed")
    # An interrupted import leaves half a module, and a build without ranks has no group at all.
    is_initialized = getattr(group, "is_initialized", lambda: False)
    return is_initialized() and group.get_world_size() > 1


def hard_exit(exit_code: int) -> NoReturn:
    """End this process with `exit_code`, without the interpreter's own teardown.

    In the teardown a thread of the process group can abort a process whose work is done, and NCCL's
    communicators may wait for ranks that have ended.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # The terminal is closed, or the disk full.
            stream.flush()
    os._exit(exit_code)


def _end(line: str, code: int) -> NoReturn:
    # The log of a job may lie on the disk that is full.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
    _discard_pending()
    raise SystemExit(code) from None


def _prepare_streams() -> None:
    """Make standard output and error accept every character, and point closed ones to /dev/null."""
    # Otherwise the next file that is opened gets a closed stream's descriptor, and its output.
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(null, True)
    os.close(null)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_pending() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Retries of requests over a network, after waits that double

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
LONGEST_ASKED_WAIT = 3600.0  # longer than the window of a server's rate limit


def retrying(
    action: Callable[[], T],
    failure: Callable[[Exception, int], Exception | None],
    note: Callable[[Exception, int, float], object],
) -> T:
    """Call `action` until it succeeds or its error is final, and return its result.

    Args:
        failure: given an error and the number of attempts so far, returns the exception to raise,
            or None to try again.
        note: called before each wait with the error, the number of attempts and the seconds.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return action()
        except Exception as error:  # Every library raises classes of its own.
            final = failure(error, attempt)
            if final is error:
                raise
            if final is not None:
                raise final from error
            wait = wait_before_retry(attempt, error)
            note(error, attempt, wait)
        time.sleep(wait)


def wait_before_retry(attempt: int, error: Exception) -> float:
    """Return the seconds to wait: the server's Retry-After, or else 1, 2, 4, … up to a minute.

    Up to a quarter is added at random, so that many workers do not return at the same moment.
    """
    headers = getattr(getattr(error, "response", error), "headers", None) or {}
    values = {str(key).lower(): str(value) for key, value in headers.items()}
    asked = re.match(r"(\d+)$", values.get("retry-after", ""))
    asked = asked or re.search(r";\s*t\s*=\s*(\d+)", values.get("ratelimit", ""))
    wait = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
    wait = min(float(asked[1]), LONGEST_ASKED_WAIT) if asked else wait
    return wait * random.uniform(1.0, 1.25)


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that an error of one of the HTTP libraries carries."""
    response = getattr(error, "response", None)
    for owner, name in ((response, "status_code"), (error, "status"), (error, "code")):
        if isinstance(value := getattr(owner, name, None), int):
            return value
    return None


def reason_of(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
