"""Temporary folders, in which files grow until they are whole and get their names by a rename.

Every call makes a folder of its own, whose name says which process made it. It has a mark from its
making on, and only marked folders are ever emptied or removed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from typing import Literal

from cat_lm.core.errors import UserError, describe_os_error, file_error, is_temporary
from cat_lm.core.files import write_text
from cat_lm.core.readers import Versioned, read_json

MARK = ".cat_lm.json"


class Mark(Versioned):
    """The mark in a temporary folder."""

    program: Literal["cat_lm"]
    temporary: Literal[True]


def own_name(place: Path, suffix: str) -> Path:
    """Return the temporary folder of this process beside a place: `.NAME.PROCESS.SUFFIX`."""
    return place.with_name(f".{place.name}.{_place_of_processes()}-{os.getpid()}.{suffix}")


def left_beside(place: Path, suffix: str) -> list[Path]:
    """List the temporary folders of all processes beside a place."""
    named = re.compile(rf"\.{re.escape(place.name)}\.[^/]+-\d+\.{re.escape(suffix)}")
    if not place.parent.is_dir():
        return []
    found = (path for path in place.parent.iterdir() if named.fullmatch(path.name))
    return sorted(path for path in found if is_ours(path))


def maker_is_gone(folder: Path) -> bool:
    """Return True if the process that `own_name` names was one of this host, and has ended."""
    host, _, rest = folder.name.removesuffix(folder.suffix).rpartition("-")
    if not host.endswith(f".{_place_of_processes()}") or not rest.isdecimal():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _place_of_processes() -> str:
    """Return this host's name, and the namespace that numbers its processes, as of a container."""
    try:
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}-{namespace}"


def make_temporary(folder: Path) -> None:
    """Make a temporary folder; one that a killed process left is taken with what is in it.

    Raises:
        UserError: something else stands there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_marked(folder):
        if not _is_begun(folder):
            raise _not_ours(folder)
        mark = Mark(format=1, program="cat_lm", temporary=True)
        write_text(folder / MARK, mark.model_dump_json() + "\n")


def is_marked(folder: Path) -> bool:
    """Return True if a folder is a temporary one of this program.

    Raises:
        TemporaryError: the mark cannot be read now.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        read_json(folder / MARK, Mark)
    except UserError as error:
        if is_temporary(error):
            raise
        return False
    return True


def is_ours(folder: Path) -> bool:
    """Return True if a folder is marked, or a kill ended its making before the mark."""
    return is_marked(folder) or _is_begun(folder)


def _is_begun(folder: Path) -> bool:
    """Return True if a kill may have left a folder between its making and its mark."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(path.name.startswith((MARK, f".{MARK}")) for path in folder.iterdir())


def empty_temporary(folder: Path) -> None:
    """Delete everything in a temporary folder but its mark. Raises UserError for another folder."""
    if not is_marked(folder):
        raise _not_ours(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def remove_temporary(folder: Path) -> None:
    """Delete a temporary folder, the mark last; nothing where there is none.

    Raises:
        UserError: something else stands there, or it cannot be removed.
    """
    if not os.path.lexists(folder):
        return
    try:
        if _is_begun(folder):
            for path in folder.iterdir():
                path.unlink()
        else:
            empty_temporary(folder)
            (folder / MARK).unlink()
        folder.rmdir()
    except OSError as error:
        text = f"{folder}: cannot be removed ({describe_os_error(error)})"
        raise file_error(text, error) from None


def _not_ours(folder: Path) -> UserError:
    return UserError(
        f"{folder}: stands where temporary files go, and was not made by this program; move it away"
    )
