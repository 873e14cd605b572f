"""Files and folders of checkpoints: schemas, completion marker, search and deletion."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cat_lm.config import RunConfig
from cat_lm.config.sections import CheckpointSection
from cat_lm.core.errors import TemporaryError, UserError, describe_os_error
from cat_lm.core.files import Algorithm, checksums, write_json, write_text
from cat_lm.core.folders import (
    files_below,
    has_owner_ended,
    make_temporary,
    remove_temporary,
    temporary_name,
)
from cat_lm.core.readers import InsideName, Record, Versioned, check_shape, read_json, read_yaml

MARKER = "complete.json"
STATE = "state.json"
RUN_CONFIG = "run_config.yaml"
WEIGHTS = "model/model.safetensors"
ALGORITHM: Algorithm = "xxh3_128"
# The files that every checkpoint has.
_REQUIRED = (STATE, RUN_CONFIG, WEIGHTS, "model/config.json")

Size = Annotated[int, Field(ge=0)]


# Errors that describe the path itself; others may be transient: of a file system or of permissions.
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL)


def describe_permanent_error(path: Path, error: OSError) -> str:
    """Return the text of an error that will persist; raise TemporaryError for any other error.

    A checkpoint must not be skipped or renamed because a network file system or permissions fail
    temporarily on one machine.
    """
    if error.errno not in _LASTING:
        raise TemporaryError(
            f"{path}: cannot be read now ({describe_os_error(error)}); when it can, the same "
            "command goes on"
        )
    return describe_os_error(error)


class StoredFile(Record):
    """The marker's entry of one file."""

    bytes: Size
    checksum: str = Field(pattern=r"^[0-9a-f]{32}$")  # hexadecimal, by the marker's algorithm


class Marker(Versioned):
    """The schema of complete.json; the checkpoint's weights and moments were found finite."""

    program: Literal["cat_lm"]
    algorithm: Literal["xxh3_128"]
    files: dict[InsideName, StoredFile]


def read_marker(folder: Path) -> dict[str, StoredFile]:
    """Return the files that a checkpoint must have, by relative path, the largest first.

    Raises:
        UserError: there is no valid marker; a `TemporaryError` if it cannot be read now.
    """
    path = folder / MARKER
    try:
        open(path, "rb").close()
    except OSError as error:
        describe_permanent_error(path, error)
    files = read_json(path, Marker).files
    if missing := [name for name in _REQUIRED if name not in files]:
        raise UserError(f"{path}: lists no {missing[0]}, which every checkpoint has")
    return dict(sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])))


def write_marker(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Write complete.json atomically; weights and moments must have been found finite."""
    listed = dict(sorted(files.items()))
    marker = Marker(format=1, program="cat_lm", algorithm=ALGORITHM, files=listed)
    write_json(folder / MARKER, marker.model_dump())


class DataState(Record):
    """The data that a run was trained on."""

    fingerprint: str
    path: str | None  # None for a mixture


class CodeVersion(Record):
    """The code that wrote a checkpoint: version, git commit (`+`: with changes) and plugins."""

    cat_lm: str
    commit: str | None
    plugins: dict[str, str]


class RunState(Versioned):
    """The schema of state.json: the position of a checkpoint in its run."""

    step: Size
    tokens: Size
    data: DataState
    world_size: Annotated[int, Field(ge=1)]
    skipped: Size
    skipped_in_a_row: Size
    code: CodeVersion
    validated: bool  # False if the validation after this step is still due


def read_run_state(folder: Path) -> RunState:
    """Read a step folder's state.json. Raises UserError with the file and the key."""
    return read_json(folder / STATE, RunState)


def read_run_config(folder: Path) -> RunConfig:
    """Read a step folder's configuration. Raises UserError with the file and the first key."""
    path = folder / RUN_CONFIG
    return check_shape(read_yaml(path), RunConfig, str(path))


STEP_FOLDER = re.compile(r"step-(\d{8,})")

Say = Callable[[str], object]


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(STEP_FOLDER.fullmatch(folder.name)[1])


def lies_in(step_folder: Path, folder: Path) -> bool:
    """Return True if a checkpoint is in a `checkpoints` folder, directly or by a link."""
    return folder.resolve() in (step_folder.parent.resolve(), step_folder.resolve().parent)


def step_folders(folder: Path) -> list[Path]:
    """Return the folders with names of checkpoints, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=step_of)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a `checkpoints` folder, oldest first."""
    return [path for path in step_folders(folder) if is_complete(path)]


def is_complete(folder: Path) -> bool:
    """Return True if the marker exists and every file has the listed size; no file is read.

    Return False if the folder cannot be accessed now.
    """
    try:
        return wrong_size(folder, read_marker(folder)) is None
    except UserError:
        return False


def wrong_size(folder: Path, files: Mapping[str, StoredFile]) -> str | None:
    """Return the problem of the first file that is missing or has another size, or None."""
    for name, file in files.items():
        try:
            found = (folder / name).stat()
        except OSError as error:
            return f"{name}: {describe_permanent_error(folder / name, error)}"
        if not stat.S_ISREG(found.st_mode):
            return f"{name}: is no file"
        if found.st_size != file.bytes:
            return f"{name}: has {found.st_size:,} bytes instead of {file.bytes:,}"
    return None


def say_to_stderr(line: str) -> None:
    """Print a line on stderr, so that stdout has only results."""
    print(line, file=sys.stderr)


def find_checkpoint(path: Path | str, say: Say = say_to_stderr) -> Path:
    """Return the newest undamaged checkpoint at `path`: a run, `checkpoints` or step folder.

    Every file of the returned folder has the size and the checksum in its marker. `say` is called
    with a line for each newer checkpoint that is damaged. Raises UserError if there is none.
    """
    return newest_whole(candidates(path), damage, say)


def candidates(path: Path | str) -> list[Path]:
    """Return all checkpoint folders at `path`, newest first. Raises UserError if there are none."""
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
    """Return the first of `found` for which `damage_of` returns None.

    Raises UserError if there is none, with the damage of the first.
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
    """Return the damage of a checkpoint as text, or None.

    Args:
        share: the files that this rank checks, as a slice of the marker's list.
        reading: called while files are read, as by `cat_lm.core.files.checksums`.

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
        return f"{path.relative_to(folder)}: {describe_permanent_error(path, error)}"
    for name, file in files.items():
        if found[folder / name] != file.checksum:
            return f"{name}: its checksum differs from the one in {MARKER}"
    return None


# The file with the name of the newest complete checkpoint, for people and other tools.
LATEST = "latest"
_LEFTOVER = re.compile(r"\.step-\d{8,}\..+\.(?:saving|deleting)")


def describe_left(folder: Path) -> str:
    """Return a text that names the newest complete checkpoint, for error messages."""
    names = [path.name for path in complete_checkpoints(folder)]
    if not names:
        return f"newest complete one: none is in {folder}"
    return f"newest complete one: {names[-1]}, of {len(names)} in {folder}"


def clear_leftovers(folder: Path, say: Say, alone: bool) -> None:
    """Remove the temporary folders of saves and deletions that were killed.

    Without the lock (`alone` is False), only those of ended processes of this host are removed.
    """
    for path in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and (alone or has_owner_ended(path)):
            try:
                remove_temporary(path)
            except UserError as error:
                say(f"{error}; it stays")


def set_aside_later(folder: Path, chosen: Path | None, say: Say) -> None:
    """Rename the checkpoint folders that a run resumed from `chosen` (or started) would overwrite.

    These are the folders of later steps, none of which is complete; if `chosen` is None or in
    another folder, they are all checkpoint folders.
    """
    is_own = chosen is not None and lies_in(chosen, folder)
    for path in step_folders(folder):
        if not is_own:
            rename_aside(path, "no checkpoint", say)
        elif step_of(path) > step_of(chosen):
            rename_aside(path, f"not whole, and later than {chosen.name}", say)
            write_text(folder / LATEST, chosen.name + "\n")


def rename_aside(path: Path, why: str, say: Say) -> None:
    """Rename a folder to `NAME.aside` instead of deleting it, and log the reason."""
    names = (f"{path.name}.aside{f'-{number}' if number > 1 else ''}" for number in count(1))
    place = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    os.rename(path, place)
    say(f"{path}: {why}; set aside as {place.name}")


def prune(folder: Path, rule: CheckpointSection, current: Path, say: Say) -> None:
    """Delete the complete checkpoints that the rule does not keep, except for `current`."""
    for path in _superfluous(folder, rule, current):
        # Rename it first, so that a half-deleted checkpoint is not mistaken for a complete one.
        doomed = temporary_name(path, "deleting")
        try:
            if others := files_below(path) - {*read_marker(path), MARKER}:
                say(f"{path}: holds {min(others)}, which its marker does not list; it stays")
                continue
            make_temporary(doomed)
            try:
                os.rename(path, doomed / path.name)
            finally:
                remove_temporary(doomed)
        except UserError as error:
            say(f"{path}: cannot be deleted ({error})")
        except OSError as error:
            say(f"{path}: cannot be deleted ({describe_os_error(error)})")


def _superfluous(folder: Path, rule: CheckpointSection, current: Path) -> list[Path]:
    # Checkpoints that are kept in any case are not examined: one of many ranks has thousands of
    # files, and all ranks wait.
    superfluous, newest = [], 0
    for path in reversed(step_folders(folder)):
        if newest < rule.keep_last:
            newest += is_complete(path)
            continue
        kept = rule.keep_every_steps and step_of(path) % rule.keep_every_steps == 0
        if not (kept or path == current or path.is_symlink()) and is_complete(path):
            superfluous.append(path)
    return superfluous[::-1]
