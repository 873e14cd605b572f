"""Folders that are either whole or absent: written beside their place, flushed, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import give_usual_mode, sync_directory
from cat_lm.core.locks import Busy, hold
from cat_lm.core.own_files import (
    MARK,
    empty_marked,
    is_marked,
    make_marked,
    remove_listed,
    remove_marked,
    take_over,
)
from cat_lm.core.paths import output_problem
from cat_lm.core.readers import clipped, resolve

_PURPOSE = "a folder on its way to {}"


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
    out: Path, listing: Callable[[Path], Collection[str]] = _nothing
) -> Iterator[Path]:
    """Yield a new folder beside `out` that takes its place when the block ends without an error.

    Its name depends on `out` alone, so that the next attempt clears what a killed one has left.
    What stands in `out` and is not of an earlier result stays there, beside the new files.

    Args:
        listing: the relative paths that a folder's own record says were written there by us, the
            record last; these alone are replaced or go.

    Raises:
        UserError: it cannot be written; or a new file has the name of one that is not ours.
    """
    from safetensors import SafetensorError

    place = resolve(out)  # of a link, the folder that it points to is replaced
    folder, old = (place.parent / f".{place.name}.{suffix}" for suffix in ("tmp", "old"))
    try:
        with _claimed(folder, place, out):
            if os.path.lexists(old) and not is_marked(old, _PURPOSE.format(place.name)):
                raise UserError(
                    f"OUT {out}: {old} stands where an earlier result waits while it is replaced, "
                    "and was not put there by this program; move it away"
                )
            _restore(place, old, listing)
            try:
                yield folder
                carried = _carry_over(place, folder, listing, out)
                _publish(folder, carried)
                if place.exists():
                    shutil.copymode(place, folder)
                    # So that it is known as ours wherever a kill leaves it.
                    take_over(place, _PURPOSE.format(place.name))
                    os.replace(place, old)
                os.replace(folder, place)
                (place / MARK).unlink()
                sync_directory(place.parent)
            finally:
                remove_marked(folder, _PURPOSE.format(place.name))
                _restore(place, old, listing)
    except OSError as error:
        text = f"OUT {out}: cannot be written: {describe_os_error(error)}"
        raise file_error(text, error) from error
    except SafetensorError as error:  # which is no OSError, not even for a full disk
        raise UserError(f"OUT {out}: cannot be written: {error}") from error


@contextmanager
def _claimed(folder: Path, place: Path, out: Path) -> Iterator[None]:
    """Make `folder` empty and hold it. Raises UserError while another command writes to it."""
    try:
        make_marked(folder, _PURPOSE.format(place.name))
    except UserError as error:
        raise UserError(f"OUT {out}: {error}") from None
    try:
        # Network file systems may have no locks for folders: there, the work goes on.
        lock = hold(folder, wait=False)
    except Busy:
        raise UserError(f"OUT {out}: another command is writing to it") from None
    with lock:
        empty_marked(folder)
        yield


def _carry_over(
    place: Path, folder: Path, listing: Callable[[Path], Collection[str]], out: Path
) -> set[Path]:
    """Link what is not ours from the earlier folder into the new one; no bytes are copied.

    Returns:
        What was carried over, in the new folder, and the folders that it is in.
    """
    carried: set[Path] = set()
    if not place.exists():
        return carried
    listed = {MARK, *listing(place)}
    for parent, folders, files in os.walk(place):
        inner = Path(parent).relative_to(place)
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (str(inner / name) for name in (*files, *linked)):
            if name in listed:
                continue
            if os.path.lexists(folder / name):
                raise UserError(
                    f"OUT {out}: {name} is not of an earlier result and would be replaced; "
                    "move it away or give another folder"
                )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(place / name, folder / name, follow_symlinks=False)
            except OSError:  # a file system without links
                shutil.copy2(place / name, folder / name, follow_symlinks=False)
            carried.add(folder / name)
        if not folders and not files and parent != str(place):
            (folder / inner).mkdir(parents=True, exist_ok=True)
        if parent != str(place) and (folder / inner).is_dir():
            shutil.copymode(place / inner, folder / inner)
            carried.add(folder / inner)
    return carried


def _restore(out: Path, old: Path, listing: Callable[[Path], Collection[str]]) -> None:
    """End a replacement: the earlier folder goes, or comes back where none took its place.

    Of the earlier one go the files that its own record lists, and those that the new one has too.
    """
    if not os.path.lexists(old):
        return
    if not out.exists():
        os.replace(old, out)
        (out / MARK).unlink(missing_ok=True)
        return
    listed = listing(old)
    for name in _files_below(old) - {*listed, MARK}:
        mine, its = old / name, out / name
        same = os.path.lexists(its) and os.path.samestat(mine.lstat(), its.lstat())
        if same or _equal(mine, its):
            mine.unlink()
    # The mark last: until then what a kill leaves is known as ours.
    if not remove_listed(old, listed) or _files_below(old) == {MARK}:
        remove_listed(old, [MARK])


def _files_below(folder: Path) -> set[str]:
    """List all files and links by their relative names."""
    found = set()
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {str(inner / name) for name in (*files, *links)}
    return found


def _equal(mine: Path, its: Path) -> bool:
    """Tell whether a file was copied where it could not be linked."""
    import filecmp

    if mine.is_symlink():
        return its.is_symlink() and os.readlink(mine) == os.readlink(its)
    return its.is_file() and filecmp.cmp(mine, its, shallow=False)


def _publish(folder: Path, carried: set[Path]) -> None:
    """Flush everything to disk, with the permissions that newly made files would have.

    Args:
        carried: files and folders of others, which keep what they had.
    """
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        if path not in carried:
            give_usual_mode(path)
        if path.is_dir():
            sync_directory(path)
        else:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(folder)
