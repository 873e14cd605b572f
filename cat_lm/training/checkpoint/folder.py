"""The care of a run's checkpoints folder: our own leftovers go, everything else is set aside."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from cat_lm.config.sections import CheckpointSection
from cat_lm.core.errors import TemporaryError, UserError, describe_os_error
from cat_lm.core.files import write_text
from cat_lm.core.host import GIB
from cat_lm.core.own_files import (
    MARK,
    asides,
    is_marked,
    other_writer,
    remove_listed,
    remove_marked,
    set_aside,
)
from cat_lm.training.checkpoint.finding import (
    Say,
    complete_checkpoints,
    is_complete,
    lies_in,
    step_folders,
    step_of,
    without_folder,
)
from cat_lm.training.checkpoint.records import MARKER, Unreadable, read_marker

# Holds the name of the newest complete checkpoint, for people and other tools.
LATEST = "latest"
PURPOSE = "a checkpoint that is being saved"
_LEFTOVER = re.compile(r"\.(step-\d{8,})\.(saving|deleting)")


def describe_left(folder: Path) -> str:
    """Say which complete checkpoint a run can go on from."""
    names = [path.name for path in complete_checkpoints(folder)]
    if not names:
        return f"newest complete one: none is in {folder}"
    return f"newest complete one: {names[-1]}, of {len(names)} in {folder}"


def clear_leftovers(folder: Path, say: Say, alone: bool) -> None:
    """End what a killed process left half-done: remove its unfinished save, go on with its prune.

    What only has such a name, and does not prove to be ours, is set aside.

    Args:
        alone: as in `remove_unfinished`.
    """
    for path in sorted(folder.iterdir()):
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        if leftover[2] == "deleting":
            _delete(path, leftover[1], say)
            continue
        try:
            if why := remove_unfinished(path, alone):
                say(f"{path}: {why}; it stays")
        except TemporaryError as error:
            say(f"{error}; it stays")
        except UserError:
            put_aside(path, "no unfinished save of this program's", say, path.name[1:])
    for path in step_folders(folder):
        unmark_saved(path)


def remove_unfinished(path: Path, alone: bool) -> str:
    """Remove an unfinished save, or say why it stays: another process may still write it.

    Args:
        alone: whether a lock keeps other processes out of the folder; else the writer that the
            save's mark names must be gone.

    Raises:
        UserError: it is not ours, or cannot be removed.
    """
    if not alone and (writer := other_writer(path, PURPOSE)):
        return f"{writer} may still write it"
    remove_marked(path, PURPOSE)
    return ""


def unmark_saved(folder: Path) -> None:
    """Remove the mark of temporary folders from one that has its final name, now or at a start."""
    with contextlib.suppress(TemporaryError):  # the checkpoint is whole with it, too
        if is_marked(folder, PURPOSE):
            (folder / MARK).unlink()


def set_aside_useless(folder: Path, chosen: Path | None, say: Say) -> None:
    """Rename what would stand in the way of a run that goes on from `chosen` (None: from nothing).

    These are step folders without a marker of ours, and those after `chosen` that are not whole.
    """
    is_own = chosen is not None and lies_in(chosen, folder)
    for path in step_folders(folder):
        try:
            read_marker(path)
        except Unreadable as error:
            say(f"{error}; it stays")
            continue
        except UserError as error:
            put_aside(path, f"no checkpoint ({without_folder(error, path)})", say)
            continue
        if is_own and step_of(path) > step_of(chosen):
            put_aside(path, f"not whole, and later than {chosen.name}", say)
            write_text(folder / LATEST, chosen.name + "\n")


def describe_asides(run: Path) -> str:
    """Say what of a run's folder was set aside, since nothing else ever removes it; or nothing."""
    found = [asides(place) for place in (run, run / "checkpoints") if place.is_dir()]
    number, size = sum(number for number, _ in found), sum(size for _, size in found)
    if not number:
        return ""
    return f"{run}: {number} set aside (*.aside*), {size / GIB:.2f} GiB; delete what is not needed"


def put_aside(path: Path, why: str, say: Say, name: str = "") -> None:
    """Rename a folder that is not to be deleted, and say so."""
    place = set_aside(path, name)
    say(f"{path}: {why}; set aside as {place.name}")


def prune(folder: Path, rule: CheckpointSection, current: Path, say: Say) -> None:
    """Delete the complete checkpoints that the rule does not keep; never `current`."""
    for path in _superfluous(folder, rule, current):
        # Out of sight first: a half-deleted checkpoint must not be taken for a whole one.
        doomed = folder / f".{path.name}.deleting"
        try:
            os.rename(path, doomed)
        except OSError as error:
            say(f"{path}: cannot be deleted ({describe_os_error(error)}); it stays")
            continue
        _delete(doomed, path.name, say)


def _superfluous(folder: Path, rule: CheckpointSection, current: Path) -> list[Path]:
    """List the complete checkpoints that go, oldest first.

    Those that stay in any case are not looked at: a checkpoint of many ranks has thousands of
    files, and all ranks wait.
    """
    found, newest = [], 0
    for path in reversed(step_folders(folder)):
        if newest < rule.keep_last:
            newest += is_complete(path)
            continue
        kept = rule.keep_every_steps and step_of(path) % rule.keep_every_steps == 0
        if not (kept or path == current or path.is_symlink()) and is_complete(path):
            found.append(path)
    return found[::-1]


def _delete(doomed: Path, name: str, say: Say) -> None:
    """Delete the files that a checkpoint's own marker lists, the marker last; keep all others."""
    try:
        listed = [*read_marker(doomed), MARKER]
    except UserError:
        listed = []  # nothing was in it but folders, or it is not ours
    try:
        if doomed.is_symlink() or not doomed.is_dir():
            left = [doomed.name]
        elif not listed and (files := [path.name for path in doomed.rglob("*") if path.is_file()]):
            left = files
        else:
            left = remove_listed(doomed, listed)
    except OSError as error:
        where = error.filename or doomed
        say(f"{where}: could not be deleted ({describe_os_error(error)}); the next start goes on")
        return
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        put_aside(doomed, f"holds what its marker does not list ({left[0]}{more})", say, name)
