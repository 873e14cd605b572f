"""The source that a command line asks for."""

from __future__ import annotations

from collections.abc import Sequence

from cat_lm.core.errors import UserError
from data_prep.sources.base import Source
from data_prep.sources.documents import Reading
from data_prep.sources.local import Files, PythonStdlib
from data_prep.sources.slimpajama import HUB_PREFIX, SAMPLE, WHOLE, Hub, Snapshot

LACKING_PATH = {
    "files": "a file, a folder or a glob",
    "slimpajama": f"{SAMPLE} (6 billion tokens in 14 GB), {WHOLE} (all 627 billion in 1.5 TB), or "
    "a folder with a copy",
}


def open_source(
    kind: str,
    path: str | None,
    reading: Reading,
    validation_path: str | None = None,
    validation_fraction: float | None = None,
    exclude: Sequence[str] = (),
) -> Source:
    """Open the source; with `validation_fraction`, one of a single document is divided for it.

    Args:
        exclude: patterns of files that are left out; of python-stdlib and files only.

    Raises:
        UserError: there is no such thing, or no file matches a pattern.
    """
    if kind == "python-stdlib":
        if path or validation_path:
            raise UserError("--source python-stdlib takes no --path: it reads the interpreter's")
        return PythonStdlib(exclude)
    if not path:
        raise UserError(f"--source {kind} needs --path: {LACKING_PATH[kind]}")
    if kind == "files":
        return Files(path, reading, validation_path, validation_fraction, exclude)
    if validation_path:
        raise UserError("--validation-path goes with --source files")
    if path.startswith(HUB_PREFIX):
        return Hub(path, reading)
    return Snapshot(path, reading)
