"""Progress on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator


def rounds(count: int, title: str) -> Iterator[int]:
    """Counts to `count` under a progress bar, which only a terminal shows."""
    from tqdm import tqdm

    yield from tqdm(range(count), desc=title, disable=None, leave=False, file=sys.stderr)


def say(line: str) -> None:
    """A line about what is being done."""
    print(line, file=sys.stderr, flush=True)
