"""Pass signals on to child commands, and lock a study's folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.folders import Busy, Lock, take_lock

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS = 0.2  # The interval in seconds between checks for a signal.


class Stopped(KeyboardInterrupt):
    """Raised for a signal that ends this command as Ctrl-C does.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """End the block by `Stopped` on a signal that ends this command, so that no process is left."""

    def interrupt(number: int, _: object) -> None:
        raise Stopped(number)

    with _set_handlers(_ENDING, interrupt):
        yield


def run_to_end(words: Sequence[str], **options: Any) -> int:
    """Run a command and wait until it has ended, whatever signals come; return its exit code.

    It is a session of its own: a Ctrl-C reaches this process only, which then asks the command to
    stop, once, and waits until it has saved.

    Args:
        options: the options of `subprocess.Popen`.

    Raises:
        Stopped: such a signal came, and the command has ended since.
    """
    came: list[int] = []
    # These handlers only record the signal: an exception could come before the process is known.
    with _set_handlers(_ENDING, lambda number, _: came.append(number)):
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )
        while process.poll() is None and not came:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
        if came:
            process.terminate()
            # Waiting must not end because nobody reads the line any more.
            with suppress(OSError, ValueError):
                line = "stopping: the running command saves first"
                print(line, file=sys.stderr, flush=True)
        code = process.wait()
    if came:
        raise Stopped(came[0])
    return code


@contextmanager
def lock_folder(out: Path) -> Iterator[Lock]:
    """Lock a study's folder for this call and the processes that it starts.

    These inherit the lock: after a `kill -9` of this program its commands go on, and a new call
    must not start others in their folders. Raises UserError where another holds it.
    """
    path = out / ".lock"
    out.mkdir(parents=True, exist_ok=True)
    try:
        # Some cluster file systems have no locks, but a study must run there too.
        lock = take_lock(path, wait=False)
    except Busy:
        raise UserError(
            f"--out {out}: another call of the study works in it, or commands that a killed one "
            f"has left behind; wait until they end, or end them (`fuser {path}` names them)"
        ) from None
    with lock:
        yield lock


@contextmanager
def _set_handlers(numbers: Sequence[int], handler: Any) -> Iterator[None]:
    """Set `handler` for signals, but for those that this process was started to ignore (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {}
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                earlier[number] = signal.signal(number, handler)
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)
