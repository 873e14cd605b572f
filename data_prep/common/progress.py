"""Progress of work that is counted in bytes."""

from __future__ import annotations

import sys

from tqdm import tqdm

PLAIN_INTERVAL = 15.0  # seconds between two lines of a log


def progress_bar(label: str, total: int, done: int = 0) -> tqdm:
    """Return a bar of bytes on standard error.

    Off a terminal, a line is written every `PLAIN_INTERVAL`, and none of shorter work.

    Args:
        total: estimate of all bytes.
        done: bytes of an earlier attempt.
    """
    interval = 0.1 if sys.stderr.isatty() else PLAIN_INTERVAL
    timing = {"delay": interval, "mininterval": interval, "maxinterval": 2 * interval}
    return tqdm(total=total, initial=done, desc=label, unit="B", unit_scale=True, **timing)
