"""Folders that are either whole or absent: written beside their place, flushed, then renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.errors import UserError
from cat_lm.files import sync_directory


def check_output(out: Path | str) -> None:
    """Before any work is done: can `out` be a folder to write to?

    Raises:
        UserError: it, or a folder that it would be in, is a file or may not be written to.
    """
    place = Path(out).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        which = "is a file" if place == Path(out).absolute() else f"{place} is a file"
        raise UserError(f"--out {out}: {which}; give a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {place} may not be written to")


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place when the block ends without an error.

    Its name depends on `out` alone, so that the next attempt clears what a killed one has left.
    """
    from safetensors import SafetensorError

    place = out.resolve()  # of a link, the folder that it points to is replaced
    folder, old = (place.parent / f".{place.name}.{suffix}" for suffix in ("tmp", "old"))
    try:
        with _claimed(folder, out):
            _restore(place, old)
            try:
                yield folder
                _publish(folder)
                if place.exists():
                    os.replace(place, old)
                os.replace(folder, place)
                sync_directory(place.parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                _restore(place, old)
    except OSError as error:
        raise UserError(f"OUT {out}: cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # which is no OSError, not even for a full disk
        raise UserError(f"OUT {out}: cannot be written: {error}") from error


@contextmanager
def _claimed(folder: Path, out: Path) -> Iterator[None]:
    """Makes `folder` empty and holds it. Raises UserError while another command writes to it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that finished just now may have renamed the folder that was opened above.
            ours = folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
        except OSError as error:
            # Network file systems may have no locks for folders: there, the work goes on.
            ours = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        if not ours:
            raise UserError(f"OUT {out}: another command is writing to it")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield
    finally:
        os.close(handle)


def _restore(out: Path, old: Path) -> None:
    """Ends a replacement: the earlier folder goes, or comes back where none took its place."""
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        os.replace(old, out)


def _publish(folder: Path) -> None:
    """Flushes everything to disk, with the permissions that newly made files would have."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        # Weights are made for their owner only.
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        if path.is_dir():
            sync_directory(path)
        else:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(folder)
