"""The folder of a run's checkpoints: leftovers of kills, the retention rule, what is set aside."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cat_lm.config.sections import CheckpointSection
from cat_lm.core.errors import UserError, describe_os_error
from cat_lm.core.files import write_text
from cat_lm.core.folders import files_below
from cat_lm.core.temporary import make_temporary, remove_temporary
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
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(?:saving|deleting)")


def describe_left(folder: Path) -> str:
    """Say which complete checkpoint a run can go on from."""
    names = [path.name for path in complete_checkpoints(folder)]
    if not names:
        return f"newest complete one: none is in {folder}"
    return f"newest complete one: {names[-1]}, of {len(names)} in {folder}"


def clear_leftovers(folder: Path, say: Say) -> None:
    """Remove the unfinished saves and prunes that killed processes left; a lock must be held."""
    for path in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            try:
                remove_temporary(path)
            except UserError as error:
                say(f"{error}; it stays")


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


def put_aside(path: Path, why: str, say: Say) -> None:
    """Rename a folder that stands in the way and is not to be deleted, and say so."""
    number = 1
    while os.path.lexists(place := path.with_name(f"{path.name}.aside{_numbered(number)}")):
        number += 1
    os.rename(path, place)
    say(f"{path}: {why}; set aside as {place.name}")


def _numbered(number: int) -> str:
    return "" if number == 1 else f"-{number}"


def prune(folder: Path, rule: CheckpointSection, current: Path, say: Say) -> None:
    """Delete the complete checkpoints that the rule does not keep; never `current`."""
    for path in _superfluous(folder, rule, current):
        # Out of sight first: a half-deleted checkpoint must not be taken for a whole one.
        doomed = folder / f".{path.name}.deleting"
        try:
            if others := files_below(path) - {*read_marker(path), MARKER}:
                say(f"{path}: holds {min(others)}, which its marker does not list; it stays")
                continue
            make_temporary(doomed)
            os.rename(path, doomed / path.name)
            remove_temporary(doomed)
        except UserError as error:
            say(f"{path}: cannot be deleted ({error})")
        except OSError as error:
            say(f"{path}: cannot be deleted ({describe_os_error(error)})")


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
