"""The files of a checkpoint that are read as text: their schemas, and one reader for each."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cat_lm.config import RunConfig
from cat_lm.errors import TemporaryError, UserError, describe_os_error
from cat_lm.io.checksums import Algorithm
from cat_lm.io.files import write_json
from cat_lm.io.readers import InsideName, Record, check_shape, read_json, read_object, read_yaml

MARKER = "complete.json"
STATE = "state.json"
RUN_CONFIG = "run_config.yaml"
WEIGHTS = "model/model.safetensors"
ALGORITHM: Algorithm = "xxh3_128"
# What a checkpoint of any version has.
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


class Marker(Record):
    """complete.json."""

    program: Literal["cat_lm"]
    algorithm: Literal["xxh3_128"]
    finite: bool = False  # whether weights and moments were looked at; not in earlier versions'
    files: dict[InsideName, StoredFile]


class EarlierMarker(Record):
    """complete.json as versions without checksums wrote it."""

    files: dict[InsideName, Size]


@dataclass(frozen=True)
class Contents:
    """The list of a marker of any version: sizes in bytes, and the checksums or none.

    Attributes:
        finite: whether weights and moments were found finite before they were hashed.
    """

    sizes: dict[str, int]
    checksums: dict[str, str]
    finite: bool = False

    def share(self, part: int = 0, parts: int = 1) -> list[str]:
        """Return every `parts`-th file from the `part`-th on, the largest first."""
        names = sorted(self.sizes, key=lambda name: (-self.sizes[name], name))
        return names[part::parts]


def read_marker(folder: Path) -> Contents:
    """Read what a step folder must hold.

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
        values = read_object(path)
    except TemporaryError as error:
        raise Unreadable(str(error)) from None
    if "program" in values:
        marker = check_shape(values, Marker, str(path))
        sizes = {name: file.bytes for name, file in marker.files.items()}
        checksums = {name: file.checksum for name, file in marker.files.items()}
        found = Contents(sizes, checksums, marker.finite)
    else:
        found = Contents(check_shape(values, EarlierMarker, str(path)).files, {})
    missing = [name for name in _REQUIRED if name not in found.sizes]
    if missing:
        raise UserError(f"{path}: lists no {missing[0]}, which every checkpoint has")
    return found


def write_marker(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Write complete.json atomically, for weights and moments that were found finite."""
    listed = dict(sorted(files.items()))
    marker = Marker(program="cat_lm", algorithm=ALGORITHM, finite=True, files=listed)
    write_json(folder / MARKER, marker.model_dump())


class DataState(Record):
    """The data that a run was trained on."""

    fingerprint: str
    path: str | None = None  # none of a mixture


class CodeVersion(Record):
    """The writer of a checkpoint: cat_lm's version, its git commit (`+`: with changes), plugins."""

    cat_lm: str | None = None
    commit: str | None = None
    plugins: dict[str, str] = Field(default_factory=dict)


class RunState(Record):
    """state.json: where in its run a checkpoint stands."""

    step: Size
    tokens: Size
    data: DataState
    world_size: Annotated[int, Field(ge=1)]
    skipped: Size = 0
    skipped_in_a_row: Size = 0
    code: CodeVersion = CodeVersion()
    validated: bool = True  # whether the validation that is due after this step was made


def read_run_state(folder: Path) -> RunState:
    """Read a step folder's state.json. Raises UserError with the file and the key."""
    return read_json(folder / STATE, RunState)


def read_run_config(folder: Path) -> RunConfig:
    """Read the configuration that a step folder was trained with.

    Keys that the version which wrote it did not know yet have their defaults.

    Raises:
        UserError: it cannot be read, or is no configuration; with the file and the first key.
    """
    path = folder / RUN_CONFIG
    return check_shape(read_yaml(path), RunConfig, str(path))
