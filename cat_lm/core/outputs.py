"""Records of the files that a command has written; only files that a record lists are replaced.

A file is replaced if a hidden file beside it lists it as the output of the same command, or if it
is a JSON result that names the command that wrote it. Other files are never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from cat_lm.core import __version__
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import files_below
from cat_lm.core.readers import InsideName, Versioned, read_json, read_object, resolve

PICTURES = (".png", ".svg")
LISTING = ".cat_lm_files.json"


class Listing(Versioned):
    """The list of files in an output folder that has no other record of them."""

    program: Literal["cat_lm"]
    files: list[InsideName]


def write_listing(folder: Path) -> None:
    """Write the list of all files in an output folder into the folder."""
    _write_list(folder / LISTING, files_below(folder) - {LISTING})


def read_listing(folder: Path) -> list[str]:
    """Return the files that `write_listing` listed, the list itself last; empty without a list."""
    names = _listed(folder / LISTING)
    return [*names, LISTING] if names else []


def result_files(stem: str, *suffixes: str) -> list[str]:
    """Return the file names of a result: the stem with each suffix."""
    return [f"{stem}{suffix}" for suffix in suffixes]


def claim_outputs(
    out: Path | str, result: str, names: Iterable[str] = (), flag: str = "--out"
) -> None:
    """Record the files that a command will write into `out`: the JSON `result` and `names`.

    Raises UserError where one exists and is not the output of an earlier run.
    """
    out = Path(out)
    listed = _listed(listing := out / f".{result}.files")
    names = list(dict.fromkeys([result, *names]))
    for name in names:
        path = out / name
        if os.path.lexists(path) and name not in listed and not is_result(path):
            raise UserError(
                f"{flag} {out}: {name} is not of an earlier run of this command and would be "
                "replaced; move it away or give another folder"
            )
    _write_list(listing, {*listed, *names})


def claim_file(path: Path | str, flag: str, command: str = "") -> None:
    """Check that `path` is free, or holds a result of a command line that begins with `command`.

    Raises UserError where another file is there, which may be the command's input.
    """
    if os.path.lexists(path) and not is_result(Path(path), command):
        whose = f"`{command}`" if command else "ours"
        raise UserError(f"{flag} {path}: holds no earlier result of {whose}; give another file")


def write_result(path: Path, flag: str, command: str, values: dict[str, Any]) -> None:
    """Write a command's values as JSON with the command and version; errors as in `claim_file`."""
    claim_file(path, flag, command)
    made = {"command": command, "versions": {"cat_lm": __version__}}
    write_json(path, made | values)


def is_result(path: Path, command: str = "") -> bool:
    """Return True if a file is a JSON result of a command line that begins with `command`."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        values = read_object(path)
    except UserError:
        return False
    made = values.get("provenance", values)
    is_ours = isinstance(made, dict) and {"command", "versions"} <= made.keys()
    return is_ours and str(made["command"]).startswith(command)


def _write_list(listing: Path, names: Iterable[str]) -> None:
    ours = Listing(format=1, program="cat_lm", files=sorted(names))
    write_text(listing, ours.model_dump_json(indent=1) + "\n")


def _listed(listing: Path) -> list[str]:
    try:
        return read_json(listing, Listing).files
    except UserError:
        return []


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete these files and the subfolders that become empty; links are not followed."""
    parents = set()
    for name in names:
        path = folder / name
        is_inside = resolve(path.parent).is_relative_to(resolve(folder))
        if is_inside and (path.is_symlink() or path.is_file()):
            path.unlink()
            parents |= {above for above in path.parents if above.is_relative_to(folder)}
    for parent in sorted(parents - {folder}, reverse=True):
        if not os.listdir(parent):
            parent.rmdir()
