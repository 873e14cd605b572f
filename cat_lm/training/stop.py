"""Stopping on a signal: every rank stops at the same step, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from types import FrameType

from cat_lm.core.errors import REQUEUE_EXIT_CODE

INTERRUPTED_EXIT_CODE = 130
_CODES = (REQUEUE_EXIT_CODE, INTERRUPTED_EXIT_CODE)  # of two the later is agreed on


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
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
        for number in heeded((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)):
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
