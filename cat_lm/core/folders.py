"""Folders that are either whole or absent: written beside their place, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import give_usual_mode, sync_directory
from cat_lm.core.locks import Busy, hold
from cat_lm.core.paths import output_problem
from cat_lm.core.readers import clipped, resolve
from cat_lm.core.temporary import (
    left_beside,
    make_temporary,
    maker_is_gone,
    own_name,
    remove_temporary,
)


def check_output(out: Path | str, flag: str = "--out") -> None:
    """Check, before any work is done, that `out` can be a folder to write to.

    Raises:
        UserError: it, or a folder that it would be in, is a file, may not be written to, or is no
            path of this machine; or it lies in /proc or /sys, where no folder can be made.
    """
    name = f"{flag} {clipped(str(out), 200)}"
    _check_path(out, name, "a folder")
    place = Path(out).absolute()
    _check_place(place, place, name, "a folder")


def check_scratch(folder: Path | None) -> None:
    """Check that --scratch names a folder that is there; None is the system's.

    Raises:
        UserError: it is none.
    """
    if folder is not None and not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise UserError(f"--scratch {folder}: {what}")


def check_file(path: Path | str) -> None:
    """Check, before any work is done, that a file can be written to `path` at the end of it.

    Raises:
        UserError: it is a folder or a device, or lies where no file can be made.
    """
    name = clipped(str(path), 200)
    _check_path(path, name, "a file")
    place = Path(path).absolute()
    try:
        if os.path.lexists(place) and not place.is_file():
            resolve(place)  # a loop is said as such
            what = "a folder" if place.is_dir() else "no regular file"
            raise UserError(f"{name}: is {what}; give a file")
    except OSError as error:
        raise file_error(f"{name}: {describe_os_error(error)}", error) from None
    _check_place(place.parent, place, name, "a file in a folder")


def _check_path(path: Path | str, name: str, wanted: str) -> None:
    if problem := output_problem(str(path)):
        raise UserError(f"{name!r}: {problem}; give {wanted}")


def _check_place(folder: Path, named: Path, name: str, wanted: str) -> None:
    """Check that `folder` can be written to, or made where it is not there yet.

    Args:
        named, name: what was asked for, `folder` or a file in it, and how messages call it.
    """
    place = folder
    try:
        while not os.path.lexists(place):
            place = place.parent
        is_folder = place.is_dir()
    except OSError as error:
        raise file_error(f"{name}: {describe_os_error(error)}", error) from None
    if not is_folder:
        if place.is_symlink() and not place.exists():
            resolve(place)  # a loop is said as such
        which = "is a file" if place == named else f"{place} is a file"
        raise UserError(f"{name}: {which}; give {wanted}")
    virtual = resolve(place).is_relative_to("/proc") or resolve(place).is_relative_to("/sys")
    if virtual or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{name}: {place} may not be written to")


def _nothing(folder: Path) -> Collection[str]:
    return ()


@contextmanager
def atomic_folder(
    out: Path, listing: Callable[[Path], Collection[str]] = _nothing, flag: str = "OUT"
) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `out` when the block ends without an error.

    An `out` that is there is replaced where its own record lists all that is in it.

    Args:
        listing: the relative paths that a folder's record says were written by its command.
        flag: names the option in messages.

    Raises:
        UserError: `out` holds anything else; another command is writing to it; or it cannot be
            written.
    """
    from safetensors import SafetensorError

    place = resolve(out)  # of a link, the folder that it points to is replaced
    named = f"{flag} {out}"
    try:
        with _claimed(place, listing, named):
            holder = own_name(place, "tmp")
            new, old = holder / "new", holder / "old"
            _check_listed(place, listing, named)
            make_temporary(holder)
            try:
                new.mkdir()
                yield new
                _publish(new)
                _replace(place, new, old, listing, named)
            except BaseException:
                with contextlib.suppress(UserError):
                    remove_temporary(holder)
                raise
            # The result is there; what cannot be tidied now goes with the next attempt.
            with contextlib.suppress(UserError):
                remove_temporary(holder)
    except OSError as error:
        text = f"{named}: cannot be written: {describe_os_error(error)}"
        raise file_error(text, error) from error
    except SafetensorError as error:  # which is no OSError, not even for a full disk
        raise UserError(f"{named}: cannot be written: {error}") from error


@contextmanager
def _claimed(place: Path, listing: Callable[[Path], Collection[str]], named: str) -> Iterator[None]:
    """Hold the lock of a place, and clear what killed commands left beside it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    path = place.with_name(f".{place.name}.writing")
    try:
        lock = hold(path, wait=False)
    except Busy:
        raise UserError(f"{named}: another command is writing to it") from None
    with lock:
        try:
            for left in left_beside(place, "tmp"):
                # Where the file system has no locks, another command may be at work.
                if lock.error is None or maker_is_gone(left):
                    _clear(left, place, listing, named)
            yield
        finally:
            path.unlink(missing_ok=True)


def _clear(left: Path, place: Path, listing: Callable[[Path], Collection[str]], named: str) -> None:
    """Remove what a killed command left, after an earlier result in it is back in its place.

    Raises:
        UserError: the place holds something else; the earlier result then stays where it is.
    """
    old = left / "old"
    if old.is_dir():
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
        if not place.exists():
            os.replace(old, place)
        # A result that is there is the newer one: the kill came after the second rename.
        _check_listed(place, listing, named)
    remove_temporary(left)


def _replace(
    place: Path, new: Path, old: Path, listing: Callable[[Path], Collection[str]], named: str
) -> None:
    """Rename the earlier result away and the new one into its place; or leave all as it was."""
    try:
        if place.exists():
            shutil.copymode(place, new)
            os.replace(place, old)
        # Once more: a file may have come meanwhile.
        _check_listed(old, listing, named)
        os.replace(new, place)
    except BaseException:
        if old.exists() and not place.exists():
            os.replace(old, place)
        raise
    sync_directory(place.parent)


def _check_listed(place: Path, listing: Callable[[Path], Collection[str]], named: str) -> None:
    """Refuse to replace a folder that holds what its own record does not list."""
    if not place.exists():
        return
    found = files_below(place)
    if found and (others := sorted(found - set(listing(place)))):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"{named}: holds {others[0]}{more}, which is not of an earlier result; move it away"
        )


def files_below(folder: Path) -> set[str]:
    """List all files, links and empty folders by their relative names; those of folders end in /"""
    found = set()
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {str(inner / name) for name in (*files, *links)}
        if not folders and not files and inner != Path():
            found.add(f"{inner}/")
    return found


def _publish(folder: Path) -> None:
    """Flush everything to disk, with the permissions that newly made files would have."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        if path.is_dir() or path.stat().st_nlink == 1:  # A hard link is somebody's file, too.
            give_usual_mode(path)
        if path.is_dir():
            sync_directory(path)
        else:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(folder)
