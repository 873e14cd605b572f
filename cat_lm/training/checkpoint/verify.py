"""The search for the newest checkpoint whose files are all as they were written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from cat_lm.core.errors import TemporaryError, UserError
from cat_lm.core.files import checksums
from cat_lm.training.checkpoint.files import (
    ALGORITHM,
    MARKER,
    STEP_FOLDER,
    Say,
    describe_lasting,
    read_marker,
    step_folders,
    wrong_size,
)


def say_to_stderr(line: str) -> None:
    """Print a line on stderr, where commands print what is no result."""
    print(line, file=sys.stderr)


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


def damage(
    folder: Path,
    share: slice = slice(None),
    reading: Callable[[Path], object] = lambda path: None,
) -> str | None:
    """Describe what is wrong with a step folder; None if nothing.

    Args:
        share: which of the files are read, in threads: one of many ranks reads some of them.
        reading: as in `cat_lm.core.files.checksums`.

    Raises:
        TemporaryError: a file cannot be read now, which is no damage.
    """
    try:
        files = dict(list(read_marker(folder).items())[share])
    except TemporaryError:
        raise
    except UserError as error:
        return str(error).removeprefix(f"{folder}/")
    if problem := wrong_size(folder, files):
        return problem
    try:
        found = checksums([folder / name for name in files], ALGORITHM, reading)
    except OSError as error:
        path = Path(error.filename or folder)
        return f"{path.relative_to(folder)}: {describe_lasting(path, error)}"
    for name, file in files.items():
        if found[folder / name] != file.checksum:
            return f"{name}: its checksum differs from the one in {MARKER}"
    return None
