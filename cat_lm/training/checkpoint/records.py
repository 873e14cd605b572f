"""The files of a checkpoint that are read as text: their schemas, and one reader for each."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cat_lm.config import RunConfig
from cat_lm.core.checksums import Algorithm
from cat_lm.core.errors import TemporaryError, UserError, describe_os_error
from cat_lm.core.files import write_json
from cat_lm.core.readers import InsideName, Record, Versioned, check_shape, read_json, read_yaml

MARKER = "complete.json"
STATE = "state.json"
RUN_CONFIG = "run_config.yaml"
WEIGHTS = "model/model.safetensors"
ALGORITHM: Algorithm = "xxh3_128"
# What every checkpoint has.
_REQUIRED = (STATE, RUN_CONFIG, WEIGHTS, "model/config.json")

Size = Annotated[int, Field(ge=0)]


class Unreadable(TemporaryError):
    """Raised where a file may be there and cannot be read now: that is no damage."""


# Errors that say what lies at a path; others are of the moment: of a file system or of rights.
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL)


def refuse_unreadable(path: Path, error: OSError) -> None:
    """Raise `Unreadable` unless the error will be the same at the next attempt.

    A checkpoint is not passed over, let alone renamed, for what a network file system or its rights
    do to one machine for a while.
    """
    if error.errno not in _LASTING:
        raise Unreadable(
            f"{path}: cannot be read now ({describe_os_error(error)}); when it can, the same "
            "command goes on"
        )


class StoredFile(Record):
    """The marker's entry of one file."""

    bytes: Size
    checksum: str = Field(pattern=r"^[0-9a-f]{32}$")  # hexadecimal, of the marker's algorithm


class Marker(Versioned):
    """complete.json, of a checkpoint whose weights and moments were found finite."""

    program: Literal["cat_lm"]
    algorithm: Literal["xxh3_128"]
    files: dict[InsideName, StoredFile]


def read_marker(folder: Path) -> dict[str, StoredFile]:
    """Read which files a step folder must hold, the largest first.

    Raises:
        UserError: there is no marker, or it is none that this program writes; `Unreadable` where
            there may be one.
    """
    path = folder / MARKER
    try:
        open(path, "rb").close()
    except OSError as error:
        refuse_unreadable(path, error)
    try:
        files = read_json(path, Marker).files
    except TemporaryError as error:
        raise Unreadable(str(error)) from None
    missing = [name for name in _REQUIRED if name not in files]
    if missing:
        raise UserError(f"{path}: lists no {missing[0]}, which every checkpoint has")
    return dict(sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])))


def write_marker(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Write complete.json atomically, for weights and moments that were found finite."""
    listed = dict(sorted(files.items()))
    marker = Marker(format=1, program="cat_lm", algorithm=ALGORITHM, files=listed)
    write_json(folder / MARKER, marker.model_dump())


class DataState(Record):
    """The data that a run was trained on."""

    fingerprint: str
    path: str | None  # none of a mixture


class CodeVersion(Record):
    """The writer of a checkpoint: cat_lm's version, its git commit (`+`: with changes), plugins."""

    cat_lm: str
    commit: str | None
    plugins: dict[str, str]


class RunState(Versioned):
    """state.json: where in its run a checkpoint stands."""

    step: Size
    tokens: Size
    data: DataState
    world_size: Annotated[int, Field(ge=1)]
    skipped: Size
    skipped_in_a_row: Size
    code: CodeVersion
    validated: bool  # whether the validation that is due after this step was made


def read_run_state(folder: Path) -> RunState:
    """Read a step folder's state.json. Raises UserError with the file and the key."""
    return read_json(folder / STATE, RunState)


def read_run_config(folder: Path) -> RunConfig:
    """Read the configuration that a step folder was trained with.

    Raises:
        UserError: it cannot be read, or is no configuration; with the file and the first key.
    """
    path = folder / RUN_CONFIG
    return check_shape(read_yaml(path), RunConfig, str(path))
