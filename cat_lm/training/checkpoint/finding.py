"""The search for the newest checkpoint whose files are all as they were written."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cat_lm.core.checksums import checksums
from cat_lm.core.errors import TemporaryError, UserError, describe_os_error
from cat_lm.training.checkpoint.records import (
    ALGORITHM,
    MARKER,
    StoredFile,
    read_marker,
    refuse_unreadable,
)

STEP_FOLDER = re.compile(r"step-(\d{8,})")

Say = Callable[[str], object]


def silent(line: str) -> None:
    """Say nothing."""


def say_to_stderr(line: str) -> None:
    """Say a line where commands say what is no result."""
    print(line, file=sys.stderr)


def step_of(folder: Path) -> int:
    """Return the step that a step folder's name says."""
    return int(STEP_FOLDER.fullmatch(folder.name)[1])


def lies_in(step_folder: Path, folder: Path) -> bool:
    """Tell whether a step folder is one of a `checkpoints` folder's, by name or behind a link."""
    return folder.resolve() in (step_folder.parent.resolve(), step_folder.resolve().parent)


def step_folders(folder: Path) -> list[Path]:
    """List the folders named as checkpoints are, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=step_of)


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the step folders in a `checkpoints` folder that `is_complete` takes, oldest first."""
    return [path for path in step_folders(folder) if is_complete(path)]


def is_complete(folder: Path) -> bool:
    """Tell whether the marker is there and every file has the size it lists; reads no file.

    What cannot be looked at now is not known to be complete.
    """
    try:
        return wrong_size(folder, read_marker(folder)) is None
    except UserError:
        return False


def find_checkpoint(path: Path | str, say: Say = say_to_stderr) -> Path:
    """Find the newest whole checkpoint at `path`: a run, a `checkpoints` or a step folder.

    Every file of the folder that is returned is there and has the size and the checksum of its
    marker, so it holds what training wrote, and that was finite. Newer ones that were passed over
    have a line each.

    Args:
        say: takes these lines.

    Raises:
        UserError: there is none; weights are never made up.
    """
    return newest_whole(candidates(path), damage, say)


def candidates(path: Path | str) -> list[Path]:
    """List the step folders at `path`, whole or not, newest first.

    Raises:
        UserError: there is none.
    """
    if not str(path):
        raise UserError("'': is no path; give a run folder or a step folder")
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint or run folder")
    if STEP_FOLDER.fullmatch(path.name):
        return [path]
    for folder in (path / "checkpoints", path):
        if found := step_folders(folder):
            return found[::-1]
    raise UserError(f"{path}: holds no complete checkpoint (a step-… folder with {MARKER})")


def newest_whole(found: list[Path], damage_of: Callable[[Path], str | None], say: Say) -> Path:
    """Take the first of `found` that `damage_of` finds nothing wrong with.

    Raises:
        UserError: there is none; the line says what is wrong with the first.
    """
    problems = []
    for folder in found:
        problem = damage_of(folder)
        if problem is None:
            return folder
        problems.append(problem)
        if len(found) > 1:
            say(f"{folder}: passed over: {problem}")
    if len(found) == 1:
        raise UserError(f"{found[0]}: is not a complete checkpoint: {problems[0]}")
    raise UserError(
        f"{found[0].parent}: holds no complete checkpoint, none of {len(found)} is whole; the "
        f"newest, {found[0].name}: {problems[0]}"
    )


def damage(folder: Path) -> str | None:
    """Describe what is wrong with a step folder; None if nothing. Reads all files, in threads."""
    try:
        files = read_marker(folder)
    except TemporaryError:
        raise
    except UserError as error:
        return without_folder(error, folder)
    return wrong_file(folder, files)


def without_folder(error: UserError, folder: Path) -> str:
    """Shorten an error on a file in `folder` to be said of the folder."""
    return str(error).removeprefix(f"{folder}/")


def wrong_file(
    folder: Path,
    files: Mapping[str, StoredFile],
    reading: Callable[[Path], object] = lambda path: None,
) -> str | None:
    """Name the first file that is not as the marker lists it; None if all are.

    Args:
        reading: as in `cat_lm.core.checksums.checksums`.
    """
    if problem := wrong_size(folder, files):
        return problem
    try:
        found = checksums([folder / name for name in files], ALGORITHM, reading)
    except OSError as error:
        name = str(Path(error.filename).relative_to(folder)) if error.filename else ""
        return _absent(folder, name, error)
    for name, file in files.items():
        if found[folder / name] != file.checksum:
            return f"{name}: its checksum differs from the one in {MARKER}"
    return None


def _absent(folder: Path, name: str, error: OSError) -> str:
    """Say that a file is not there. Raises `Unreadable` where it may be."""
    refuse_unreadable(folder / name, error)
    return f"{name}: {describe_os_error(error)}"


def wrong_size(folder: Path, files: Mapping[str, StoredFile]) -> str | None:
    """Name the first file that is missing or of another size than listed; None if none."""
    for name, file in files.items():
        try:
            found = (folder / name).stat()
        except OSError as error:
            return _absent(folder, name, error)
        if not stat.S_ISREG(found.st_mode):
            return f"{name}: is no file"
        if found.st_size != file.bytes:
            return f"{name}: has {found.st_size:,} bytes instead of {file.bytes:,}"
    return None
