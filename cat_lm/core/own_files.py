"""Delete what this program wrote and can prove that it wrote; set aside or refuse the rest.

Two kinds of proof. A *listing* inside a folder (complete.json, export.json, a manifest) names the
files that were written there; only these go. A *mark* claims a folder of temporary files from its
making on, by the folder's own inode: what was copied, or made by hand, is not ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cat_lm.core.errors import UserError, describe_os_error, file_error, is_temporary
from cat_lm.core.files import write_text
from cat_lm.core.readers import InsideName, Record, Versioned, read_json

MARK = ".cat_lm.json"
LISTING = ".cat_lm_files.json"
_ASIDE = re.compile(r"\.aside(?:-\d+)?$")


class Writer(Record):
    """The process that marked a folder.

    Attributes:
        numbering: of process ids; containers of one host have their own.
        job: SLURM's number, for people; empty outside of one.
    """

    host: str
    numbering: str
    pid: int
    job: str = ""


class Mark(Versioned):
    """The mark in a folder of ours."""

    program: Literal["cat_lm"]
    purpose: str
    inode: int
    writer: Writer


class Listing(Versioned):
    """The files that were written into a folder, for folders without a record of another kind."""

    program: Literal["cat_lm"]
    files: list[InsideName]


def write_listing(folder: Path) -> None:
    """List all files of a folder of ours, in a file beside them."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    ours = Listing(format=1, program="cat_lm", files=sorted(set(names) - {MARK, LISTING}))
    (folder / LISTING).write_text(ours.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_listing(folder: Path) -> list[str]:
    """Read what `write_listing` wrote, itself last; nothing where there is no such list."""
    try:
        return [*read_json(folder / LISTING, Listing).files, LISTING]
    except UserError:
        return []


def make_marked(folder: Path, purpose: str) -> None:
    """Make a folder of ours, which `remove_marked` may delete with all that is in it.

    One that is there already is taken where it is ours, or has nothing in it.

    Raises:
        UserError: there is something else of that name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_marked(folder, purpose):
        return
    if not is_only_begun(folder):
        raise _not_ours(folder)
    # Not replaced atomically: there is nothing else in the folder yet.
    (folder / MARK).write_text(_mark(folder, purpose), encoding="utf-8")


def _mark(folder: Path, purpose: str) -> str:
    inode, writer = folder.stat().st_ino, _this_process()
    mark = Mark(format=1, program="cat_lm", purpose=purpose, inode=inode, writer=writer)
    return mark.model_dump_json() + "\n"


def _this_process() -> Writer:
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbering = ""
    job = os.environ.get("SLURM_JOB_ID", "")
    return Writer(host=socket.gethostname(), numbering=numbering, pid=os.getpid(), job=job)


def take_over(folder: Path, purpose: str) -> None:
    """Mark a folder with what is in it; for callers who have seen that all of that is ours.

    Raises:
        UserError: it is a link, or no folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise _not_ours(folder)
    write_text(folder / MARK, _mark(folder, purpose))


def is_only_begun(folder: Path) -> bool:
    """Tell whether a kill may have left the folder between its making and its mark."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return {path.name for path in folder.iterdir()} <= {MARK}


def _not_ours(folder: Path) -> UserError:
    return UserError(
        f"{folder}: stands where temporary files go, and was not made by this program; move it away"
    )


def is_marked(folder: Path, purpose: str) -> bool:
    """Tell whether `make_marked` made this very folder, and not one that it was copied from."""
    found = _read_mark(folder, purpose)
    return found is not None and found[0].inode == found[1]


def bears_mark(folder: Path, purpose: str) -> bool:
    """Tell whether `make_marked` made this folder, or one that it was copied from."""
    return _read_mark(folder, purpose) is not None


def _read_mark(folder: Path, purpose: str) -> tuple[Mark, int] | None:
    """Read the mark of a folder of ours, and the folder's own inode; None where it has none.

    Raises:
        TemporaryError: neither can be told for a while.
    """
    try:
        own = folder.lstat()
        if not stat.S_ISDIR(own.st_mode):
            return None
        mark = read_json(folder / MARK, Mark)
    except (OSError, UserError) as error:
        if not is_temporary(error):
            return None
        if isinstance(error, UserError):
            raise
        raise file_error(f"{folder}: {describe_os_error(error)}", error) from None
    return (mark, own.st_ino) if mark.purpose == purpose else None


def other_writer(folder: Path, purpose: str) -> str:
    """Name the other process that may still write into a folder of ours, where no lock tells.

    Nothing where this one marked it, or one of this host that is gone; or where it is not ours.
    """
    found = _read_mark(folder, purpose)
    if found is None:
        return "another process" if is_only_begun(folder) else ""
    writer, here = found[0].writer, _this_process()
    is_here = (writer.host, writer.numbering) == (here.host, here.numbering)
    if is_here and (writer.pid == here.pid or not is_alive(writer.pid)):
        return ""
    job = f" (job {writer.job})" if writer.job else ""
    return f"process {writer.pid} on {writer.host}{job}"


def is_alive(pid: int) -> bool:
    """Tell whether a process of this number may run here."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def remove_marked(folder: Path, purpose: str) -> None:
    """Delete a folder that `make_marked` made, whole; nothing where there is none.

    Raises:
        UserError: there is something else of that name, or the folder cannot be removed.
    """
    if not os.path.lexists(folder):
        return
    if not is_marked(folder, purpose) and not is_only_begun(folder):
        raise _not_ours(folder)
    try:
        # The mark goes last: a kill in between leaves a folder that is still known as ours.
        empty_marked(folder)
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        raise file_error(f"{folder}: cannot be removed ({error.strerror})", error) from None


def empty_marked(folder: Path) -> None:
    """Delete what is in a folder that is known as ours, but for its mark."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def remove_listed(folder: Path, names: Iterable[str]) -> list[str]:
    """Delete the files of `folder` that `names` lists, then the folders that this leaves empty.

    Links are deleted, never followed; `folder` itself goes where nothing else is in it.

    Args:
        names: relative paths, as a listing of ours holds them.

    Returns:
        The relative paths of what stays, because it is not listed.
    """
    remove_files(folder, names)
    return remove_empty(folder)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete the files of `folder` that `names` lists, and the folders in it that held only them.

    Links are deleted, never followed.
    """
    parents = set()
    for name in names:
        path = folder / name
        if _leads_out(folder, name) or not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            parents |= {above for above in path.parents if above.is_relative_to(folder)}
    for parent in sorted(parents - {folder}, reverse=True):
        if not os.listdir(parent):
            parent.rmdir()


def remove_empty(folder: Path) -> list[str]:
    """Delete the empty folders below `folder` and then itself; return the files that keep it."""
    left = []
    for parent, folders, files in os.walk(folder, topdown=False):
        place = Path(parent)
        linked = [name for name in folders if (place / name).is_symlink()]
        left += [str((place / name).relative_to(folder)) for name in (*files, *linked)]
        if not os.listdir(place):
            place.rmdir()
    return sorted(left)


def _leads_out(folder: Path, name: str) -> bool:
    """Tell whether a link on the way makes the name one of another folder's."""
    place = folder
    for part in Path(name).parts[:-1]:
        place = place / part
        if place.is_symlink():
            return True
    return ".." in Path(name).parts or Path(name).is_absolute()


def asides(folder: Path) -> tuple[int, int]:
    """Count what `set_aside` has left in a folder, not below it, and the bytes of all of it."""
    found = [path for path in folder.iterdir() if _ASIDE.search(path.name)]
    return len(found), sum(_size(path) for path in found)


def _size(path: Path) -> int:
    """Sum the bytes of a file or of all files of a folder; what goes meanwhile counts as none."""
    inside = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    total = 0
    for file in inside:
        with contextlib.suppress(OSError):
            found = file.lstat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def set_aside(path: Path, name: str = "") -> Path:
    """Rename a file or folder that is not ours to delete, and return its new place beside it.

    Args:
        name: what its new name begins with, where its own is a hidden one.
    """
    number = 1
    while True:
        suffix = ".aside" if number == 1 else f".aside-{number}"
        place = path.with_name((name or path.name) + suffix)
        if not os.path.lexists(place):
            os.rename(path, place)
            return place
        number += 1
