"""Files that are either whole or absent: atomic replacement, flushes to disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path | str, mode: str = "w") -> Iterator[IO]:
    """Opens a temporary file beside `path`; on success it is flushed to disk and renamed to it.

    On any error the temporary file is removed and `path` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = None if "b" in mode else "utf-8"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_text(path: Path | str, text: str) -> None:
    """Writes `text` atomically."""
    with replacing(path) as stream:
        stream.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Writes `value` atomically as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_directory(path: Path | str) -> None:
    """Flushes a directory's entries, so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
