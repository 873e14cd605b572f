"""The locks of a preparation, and the note where a file system has none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.core.folders import hold

_noted = False


@contextmanager
def file_lock(path: Path, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file, as `hold` does; give whether it holds anybody back.

    A file system that knows no locks is noted: what is written there must be safe without them, if
    perhaps done twice.
    """
    with hold(path, shared=shared, wait=wait) as lock:
        if lock.error is not None:
            _note(path.parent, lock.error)
        yield lock.error is None


def _note(folder: Path, error: OSError) -> None:
    global _noted
    if not _noted:
        _noted = True
        print(
            f"note: {folder}: no file locks here ({error.strerror}); what is done stays whole, "
            "but start no two preparations into one folder, they would do the work twice",
            file=sys.stderr,
        )
