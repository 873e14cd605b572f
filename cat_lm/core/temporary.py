"""Temporary folders, in which files grow until they are whole and get their names by a rename.

A temporary folder has a mark from its making on. Only marked folders are ever emptied or removed;
what a killed process left behind goes when the same place is used again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from cat_lm.core.errors import UserError, describe_os_error, file_error, is_temporary
from cat_lm.core.readers import Versioned, read_json

MARK = ".cat_lm.json"


class Mark(Versioned):
    """The mark in a temporary folder."""

    program: Literal["cat_lm"]
    temporary: Literal[True]


def make_temporary(folder: Path) -> None:
    """Make a temporary folder; one that a killed process left is taken with what is in it.

    Raises:
        UserError: something else stands there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_marked(folder):
        if folder.is_symlink() or any(folder.iterdir()):
            raise _not_ours(folder)
        mark = Mark(format=1, program="cat_lm", temporary=True)
        (folder / MARK).write_text(mark.model_dump_json() + "\n", encoding="utf-8")


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
        # A kill between a folder's making and its mark leaves an empty one.
        if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
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
