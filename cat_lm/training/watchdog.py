"""End a rank early: on a signal, without progress, or without its launcher.

After a signal, all ranks save a checkpoint after the same step and end. A rank without progress
ends its process, so that a hanging job does not waste compute time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cat_lm.core.errors import REQUEUE_EXIT_CODE, TemporaryError, UserError, launched_rank
from cat_lm.training.launcher import Launcher

# Launchers restart the job on this code; it is not 1, so that hangs can be recognized.
HUNG_EXIT_CODE = 76
# A rank whose launcher is gone ends without progress for ORPHAN_SECONDS and for ORPHAN_STEPS times
# the longest step, because its peers may be gone, too.
ORPHAN_SECONDS, ORPHAN_STEPS = 30.0, 3.0
_ending = threading.Lock()
INTERRUPTED_EXIT_CODE = 130
_CODES = (REQUEUE_EXIT_CODE, INTERRUPTED_EXIT_CODE)  # If ranks vote for both, the last counts.


def handled_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals without HUP if this process ignores it, as under nohup."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not is_deaf]


class StopSignal:
    """Record TERM, USR1 and HUP; all ranks agree by `votes` to stop after the same step.

    A cluster may signal a single rank, at any moment. A run with one rank stops after the current
    step. With several ranks the next step carries the votes: the run stops after it on CPUs, and
    one step later on GPUs, where numbers are read a step late. Before the first step Ctrl-C ends
    the process at once; later only a second Ctrl-C does. HUP acts as TERM, unless nohup ignores it.
    """

    def __init__(self) -> None:
        self._exit_code = 0
        for number in handled_signals((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)):
            signal.signal(number, self._note)

    def catch_interrupts(self) -> None:
        """Handle the first INT (Ctrl-C) after the current step from now on."""
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = INTERRUPTED_EXIT_CODE if number == signal.SIGINT else REQUEUE_EXIT_CODE
        self._exit_code = self._exit_code or code
        # print may not be called within another print, and the terminal may be closed.
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            os.write(2, f"{name} received: a checkpoint follows after this step\n".encode())

    def request(self) -> None:
        """Stop all ranks after this step, as TERM would."""
        self._exit_code = self._exit_code or REQUEUE_EXIT_CODE

    def votes(self) -> tuple[int, ...]:
        """Return this rank's votes, one number per exit code, which a step sums over all ranks."""
        return tuple(int(code == self._exit_code) for code in _CODES)

    def agreed_exit_code(self, votes: Sequence[float], alone: bool) -> int:
        """Return the exit code to stop with after this step, or 0; it is equal on all ranks.

        Args:
            votes: the `votes` of this step, summed over all ranks.
            alone: whether there is only one rank, whose newest vote counts without agreement.
        """
        votes = self.votes() if alone else votes
        return max((code for code, vote in zip(_CODES, votes, strict=True) if vote), default=0)


class Watchdog:
    """End the process with `HUNG_EXIT_CODE` when `progress` is not called for `minutes`.

    First the stacks of all threads and the rank's last action are written to stderr. If one rank of
    many hangs, the others wait in a collective, and the rank with a different stack is the cause.

    A rank whose launcher is gone ends with `REQUEUE_EXIT_CODE`: before the first step at once,
    later after the current step and a checkpoint, as after a signal. If no step ends any more, for
    example because peers are gone, it ends without a checkpoint.

    A thread watches. If a call blocks the interpreter's lock, the thread of `faulthandler` writes
    the stacks and ends the process with code 1, after twice the time.
    """

    def __init__(self, minutes: float, launcher: Launcher | None = None) -> None:
        self._limit = 60 * minutes
        self._launcher = launcher
        self._stop: StopSignal | None = None  # set at the first step
        self._orphaned_since: float | None = None
        self._longest, self._allows_slow_work = 0.0, False
        self._last, self._what = time.monotonic(), "its start"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def progress(self, what: str) -> None:
        """Record that the rank is alive and has just done `what`."""
        now = time.monotonic()
        if not self._allows_slow_work:
            self._longest = max(self._longest, now - self._last)
        self._last, self._what = now, what

    def begin_steps(self, stop: StopSignal) -> None:
        """From now on, request a stop with a checkpoint when the launcher is gone."""
        self._longest, self._last = 0.0, time.monotonic()
        self._stop = stop

    @contextmanager
    def allow_slow_work(self) -> Iterator[None]:
        """Allow the full `minutes` in the block, since a save may take longer than a step."""
        self._allows_slow_work = True
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._allows_slow_work = False

    @contextmanager
    def ending_orphans(self) -> Iterator[None]:
        """End the process with the orphan's message if a lost launcher may have caused an error."""
        try:
            yield
        except Exception as error:
            # A permanent UserError is bad input; other errors may follow from a lost launcher.
            if isinstance(error, UserError) and not isinstance(error, TemporaryError):
                raise
            for _ in range(20 if self._launcher is not None else 0):
                if self._launcher.is_gone():
                    _end_orphaned(self._launcher, f" ({type(error).__name__} after {self._what})")
                time.sleep(0.1)  # Its connections close shortly before the process has ended.
            raise

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            faulthandler.dump_traceback_later(2 * self._limit, exit=True, file=sys.__stderr__)
            if self._closed.wait(min(self._limit / 4, 1.0)):
                return
            waited = time.monotonic() - self._last
            if waited > self._limit:
                self._end_hung(waited)
            if self._launcher is not None and self._launcher.is_gone():
                self._handle_lost_launcher(self._launcher, waited)

    def _end_hung(self, waited: float) -> NoReturn:
        _write_line(
            f"no progress for {waited / 60:.1f} minutes after {self._what} (train.hang_minutes); "
            f"the run ends here with code {HUNG_EXIT_CODE}, its checkpoints are as they were. "
            "What each thread was doing:"
        )
        faulthandler.dump_traceback(file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(HUNG_EXIT_CODE)

    def _handle_lost_launcher(self, launcher: Launcher, waited: float) -> None:
        stop, now = self._stop, time.monotonic()
        if stop is None:
            _end_orphaned(launcher, ", before the first step")
        if self._orphaned_since is None:
            self._orphaned_since = now
            _write_line(f"{_lost_launcher_text(launcher)}: a checkpoint follows after this step")
            stop.request()
        still = min(waited, now - self._orphaned_since)
        if not self._allows_slow_work and still > max(ORPHAN_SECONDS, ORPHAN_STEPS * self._longest):
            _end_orphaned(launcher, f", and no progress for {still:.0f} s after {self._what}")


def _lost_launcher_text(launcher: Launcher) -> str:
    return f"the launcher (process {launcher.line[-1]}) is gone"


def _end_orphaned(launcher: Launcher, when: str) -> NoReturn:
    _ending.acquire()  # It is never released: of two threads only one writes the line.
    _write_line(
        f"{_lost_launcher_text(launcher)}{when}: the run ends here with code {REQUEUE_EXIT_CODE}, "
        "its checkpoints are as they were"
    )
    os._exit(REQUEUE_EXIT_CODE)


def _write_line(text: str) -> None:
    """Write a line about this rank to stderr, which may be closed."""
    with contextlib.suppress(OSError):
        os.write(2, f"rank {launched_rank()} on {host_name()}: {text}\n".encode())


def host_name() -> str:
    """Return SLURM's name of the node, or the host name outside of SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
