"""Open the source of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from cat_lm.core.errors import UserError
from data_prep.sources.base import Source
from data_prep.sources.documents import Reading
from data_prep.sources.local import Files, PythonStdlib
from data_prep.sources.presets import HUB_PREFIX, PRESETS
from data_prep.sources.repository import Hub, Snapshot

_SAMPLE, _WHOLE = PRESETS["slimpajama-6b"].path, PRESETS["slimpajama-627b"].path
LACKING_PATH = {
    "files": "a file, a folder or a glob",
    "hub": f"{HUB_PREFIX}OWNER/NAME[/FOLDER][@REVISION], or a folder with a copy",
    "slimpajama": f"{_SAMPLE} (6 billion tokens in 14 GB), {_WHOLE} (all 627 billion in 1.5 TB), "
    "or a folder with a copy",
}


def open_source(
    kind: str,
    path: str | None,
    reading: Reading,
    validation_path: str | None = None,
    validation_fraction: float | None = None,
    exclude: Sequence[str] = (),
    preset: str | None = None,
    commit: str | None = None,
) -> Source:
    """Open the source; with `validation_fraction`, a single document is divided for validation.

    Args:
        exclude: patterns of files to leave out.
        preset: the name of a known data set, or None.
        commit: the commit of an earlier listing on the Hub, which is used instead of the branch.

    Raises:
        UserError: the source does not exist, or a pattern matches no file.
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
        return Hub(kind, path, reading, exclude, preset, commit)
    return Snapshot(kind, path, reading, exclude, preset)
