"""A progress bar for work that is measured in bytes."""

from __future__ import annotations

import sys

from tqdm import tqdm

PLAIN_INTERVAL = 15.0  # seconds between two lines in a log file


def progress_bar(label: str, total: int, done: int = 0) -> tqdm:
    """Return a progress bar of bytes on standard error.

    If that is no terminal, a line is written every `PLAIN_INTERVAL` seconds.

    Args:
        total: estimated number of bytes.
        done: bytes that an earlier attempt has done.
    """
    interval = 0.1 if sys.stderr.isatty() else PLAIN_INTERVAL
    timing = {"delay": interval, "mininterval": interval, "maxinterval": 2 * interval}
    return tqdm(total=total, initial=done, desc=label, unit="B", unit_scale=True, **timing)
