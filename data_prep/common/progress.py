"""A progress bar on a terminal; now and then a plain line where there is none."""

from __future__ import annotations

import sys
import time

PLAIN_INTERVAL = 15.0  # seconds


class TextProgress:
    """Counts bytes, of text by default. `total` is an estimate, None where there is none."""

    def __init__(self, label: str, total: int | None, what: str = "of text") -> None:
        from tqdm import tqdm

        self._label = label
        self._total = total
        self._what = what
        self._done = self._before = 0
        self._start = self._last = time.monotonic()
        self._bar = tqdm(
            total=total, desc=label, unit="B", unit_scale=True, disable=None, file=sys.stderr
        )

    def __enter__(self) -> TextProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def start(self, done: int) -> None:
        """Counts what an earlier run has done: part of the total, not of the speed."""
        self._done = self._before = done
        self._bar.reset(self._total)
        self._bar.initial = done
        self._bar.update(done)

    def update(self, text_bytes: int) -> None:
        self._done += text_bytes
        self._bar.update(text_bytes)
        now = time.monotonic()
        if self._bar.disable and now - self._last >= PLAIN_INTERVAL:
            self._last = now
            share = f" of about {self._total / 1e6:.0f}" if self._total else ""
            rate = (self._done - self._before) / (now - self._start) / 1e6
            print(
                f"{self._label}: {self._done / 1e6:.0f}{share} MB {self._what}, {rate:.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )
