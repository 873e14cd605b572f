"""Stopping on a signal: every rank stops at the same step, with a checkpoint."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from cat_lm.training.distributed import Ranks

# sysexits' EX_TEMPFAIL: the job was stopped and can go on; launchers requeue on it.
REQUEUE_EXIT_CODE = 75
INTERRUPTED_EXIT_CODE = 130


class StopSignal:
    """Notes TERM, USR1 and INT; `agreed` tells all ranks the same answer.

    A cluster may signal only one rank. A second INT ends the process at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._received = 0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = max(self._received, number)
        name = signal.Signals(number).name
        print(f"{name} received: a checkpoint follows after this step", file=sys.stderr)

    def agreed(self) -> int:
        """The exit code to stop with after this step, or 0; equal on all ranks (a collective)."""
        received = int(self._ranks.maximum(self._received))
        if not received:
            return 0
        return INTERRUPTED_EXIT_CODE if received == signal.SIGINT else REQUEUE_EXIT_CODE
