"""Ends a rank that makes no progress, so that a job that hangs does not burn hours."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time

# Launchers start the job again on it; 1 would do as well, but says less.
HUNG_EXIT_CODE = 76


class Watchdog:
    """Ends the process with `HUNG_EXIT_CODE` when `progress` is not called for `minutes`.

    The stacks of all threads go to stderr first, with what the rank did last: where one rank of
    many hangs, the others wait for it in a collective, and the odd one out is the culprit. A
    launcher that ends a job with its first failing rank (`srun --kill-on-bad-exit`) does the rest.

    A thread watches. If the interpreter itself is stuck in a call that holds its lock, no Python
    thread runs any more; then `faulthandler`'s own thread writes the stacks and ends the process
    with code 1, after twice the time.
    """

    def __init__(self, minutes: float) -> None:
        self._limit = 60 * minutes
        self._last, self._what = time.monotonic(), "its start"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def progress(self, what: str) -> None:
        """Notes that the rank is alive and has just done `what`."""
        self._last, self._what = time.monotonic(), what

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            faulthandler.dump_traceback_later(2 * self._limit, exit=True, file=sys.__stderr__)
            if self._closed.wait(min(self._limit / 4, 10.0)):
                return
            waited = time.monotonic() - self._last
            if waited > self._limit:
                self._end(waited)

    def _end(self, waited: float) -> None:
        rank, host = os.environ.get("RANK", "0"), host_name()
        sys.__stderr__.write(
            f"rank {rank} on {host}: no progress for {waited / 60:.1f} minutes after {self._what} "
            f"(train.hang_minutes); the run ends here with code {HUNG_EXIT_CODE}, its checkpoints "
            "are as they were. What each thread was doing:\n"
        )
        faulthandler.dump_traceback(file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(HUNG_EXIT_CODE)


def host_name() -> str:
    """SLURM's name of the node where there is one, else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
