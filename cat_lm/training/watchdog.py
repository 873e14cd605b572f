"""When a rank ends early: on a signal, without progress, or without its launcher.

A signal is answered with a checkpoint after the step, on all ranks alike. A rank that makes no
progress ends, so that no hanging job burns hours.
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

from cat_lm.core.errors import REQUEUE_EXIT_CODE, TemporaryError, UserError
from cat_lm.training.launcher import Launcher

# Launchers start the job again on it; 1 would do as well, but says less.
HUNG_EXIT_CODE = 76
# A rank without launcher, whose peers may be gone, too, ends after so many seconds without
# progress, at least, and after so many times the longest step.
ORPHAN_SECONDS, ORPHAN_STEPS = 30.0, 3.0
_ending = threading.Lock()
INTERRUPTED_EXIT_CODE = 130
_CODES = (REQUEUE_EXIT_CODE, INTERRUPTED_EXIT_CODE)  # of two the later is agreed on


def handled_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Leave HUP out where this process was started to outlive its terminal (nohup)."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not is_deaf]


class StopSignal:
    """Note TERM, USR1 and HUP; by `votes` all ranks learn of them in the same step.

    A cluster may signal only one rank, and at any moment. One rank alone stops after the step in
    which the signal comes; several after the next, which carries the votes, or on GPUs, where its
    numbers are read a step later, after the one that follows. Ctrl-C ends a start at once, steps
    only at its second time. HUP is as TERM, unless nohup has it ignored.
    """

    def __init__(self) -> None:
        self._exit_code = 0
        for number in handled_signals((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)):
            signal.signal(number, self._note)

    def catch_interrupts(self) -> None:
        """From here on the first INT, too, is answered after a step."""
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = INTERRUPTED_EXIT_CODE if number == signal.SIGINT else REQUEUE_EXIT_CODE
        self._exit_code = self._exit_code or code
        # Not print: the signal may come in the middle of another one. The terminal may be gone.
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            os.write(2, f"{name} received: a checkpoint follows after this step\n".encode())

    def request(self) -> None:
        """Stop the ranks after this step, as TERM does from outside."""
        self._exit_code = self._exit_code or REQUEUE_EXIT_CODE

    def votes(self) -> tuple[int, ...]:
        """Return this rank's wishes, one for each code, to be summed over all ranks in a step."""
        return tuple(int(code == self._exit_code) for code in _CODES)

    def agreed_exit_code(self, votes: Sequence[float], alone: bool) -> int:
        """Return the exit code to stop with after this step, or 0; equal on all ranks.

        Args:
            votes: the sums of all ranks' `votes` of this step.
            alone: whether there is one rank, whose newest wish counts: none has to agree.
        """
        votes = self.votes() if alone else votes
        return max((code for code, vote in zip(_CODES, votes, strict=True) if vote), default=0)


class Watchdog:
    """End the process with `HUNG_EXIT_CODE` when `progress` is not called for `minutes`.

    The stacks of all threads go to stderr first, with what the rank did last: where one rank of
    many hangs, the others wait for it in a collective, and the odd one out is the culprit.

    A rank whose launcher is gone ends with `REQUEUE_EXIT_CODE`: before the first step at once, then
    after the step and a checkpoint, as on a signal; without one where no step ends any more, as
    where peers are gone, too.

    A thread watches. Where a call holds the interpreter's lock, `faulthandler`'s own thread writes
    the stacks and ends the process with code 1, after twice the time.
    """

    def __init__(self, minutes: float, launcher: Launcher | None = None) -> None:
        self._limit = 60 * minutes
        self._launcher = launcher
        self._stop: StopSignal | None = None  # from the first step on
        self._orphaned_since: float | None = None
        self._longest, self._unhurried = 0.0, False
        self._last, self._what = time.monotonic(), "its start"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def progress(self, what: str) -> None:
        """Note that the rank is alive and has just done `what`."""
        now = time.monotonic()
        if not self._unhurried:
            self._longest = max(self._longest, now - self._last)
        self._last, self._what = now, what

    def steps_begin(self, stop: StopSignal) -> None:
        """From here on, tell `stop` of a lost launcher, so that a checkpoint follows."""
        self._longest, self._last = 0.0, time.monotonic()
        self._stop = stop

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Inside, only `minutes` limit the time: a save is not cut off because a step is quick."""
        self._unhurried = True
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._unhurried = False

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """End the process as a lost launcher does, where that may have caused an error inside."""
        try:
            yield
        except Exception as error:
            # Bad input has no other cause; ranks that did not meet may have lost the launcher.
            if isinstance(error, UserError) and not isinstance(error, TemporaryError):
                raise
            for _ in range(20 if self._launcher is not None else 0):
                if self._launcher.is_gone():
                    _end_orphaned(self._launcher, f" ({type(error).__name__} after {self._what})")
                time.sleep(0.1)  # Its connections are closed a moment before it counts as ended.
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
                self._without_launcher(self._launcher, waited)

    def _end_hung(self, waited: float) -> NoReturn:
        _say(
            f"no progress for {waited / 60:.1f} minutes after {self._what} (train.hang_minutes); "
            f"the run ends here with code {HUNG_EXIT_CODE}, its checkpoints are as they were. "
            "What each thread was doing:"
        )
        faulthandler.dump_traceback(file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(HUNG_EXIT_CODE)

    def _without_launcher(self, launcher: Launcher, waited: float) -> None:
        stop, now = self._stop, time.monotonic()
        if stop is None:
            _end_orphaned(launcher, ", before the first step")
        if self._orphaned_since is None:
            self._orphaned_since = now
            _say(f"{_gone(launcher)}: a checkpoint follows after this step")
            stop.request()
        still = min(waited, now - self._orphaned_since)
        if not self._unhurried and still > max(ORPHAN_SECONDS, ORPHAN_STEPS * self._longest):
            _end_orphaned(launcher, f", and no progress for {still:.0f} s after {self._what}")


def _gone(launcher: Launcher) -> str:
    return f"the launcher (process {launcher.line[-1]}) is gone"


def _end_orphaned(launcher: Launcher, when: str) -> NoReturn:
    _ending.acquire()  # for good: two threads may find it out, one line says it
    _say(
        f"{_gone(launcher)}{when}: the run ends here with code {REQUEUE_EXIT_CODE}, its "
        "checkpoints are as they were"
    )
    os._exit(REQUEUE_EXIT_CODE)


def _say(text: str) -> None:
    """Write a line about this rank to stderr, which may have gone with the launcher."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    with contextlib.suppress(OSError):
        os.write(2, f"rank {rank} on {host_name()}: {text}\n".encode())


def host_name() -> str:
    """Return SLURM's name of the node where there is one, else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
