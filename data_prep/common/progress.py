"""A progress bar on a terminal; now and then a plain line where there is none."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

PLAIN_INTERVAL = 15.0  # seconds


class TextProgress(tqdm):
    """A bar of bytes, of text by default; `done` of its `total` (an estimate) came before it."""

    def __init__(self, label: str, total: int, what: str = "of text", done: int = 0) -> None:
        super().__init__(
            total=total,
            desc=label,
            unit="B",
            unit_scale=True,
            disable=None,
            initial=done,
            file=sys.stderr,
        )
        self._plain = (label, total, what)
        self._before = self._done = done
        self._start = self._last = time.monotonic()

    def update(self, n: int = 1) -> None:
        """Count more bytes."""
        super().update(n)
        self._done += n
        now = time.monotonic()
        if self.disable and now - self._last >= PLAIN_INTERVAL:
            self._last = now
            label, total, what = self._plain
            rate = (self._done - self._before) / (now - self._start) / 1e6
            size = f"{self._done / 1e6:.0f} of about {total / 1e6:.0f} MB {what}"
            print(f"{label}: {size}, {rate:.1f} MB/s", file=sys.stderr, flush=True)
