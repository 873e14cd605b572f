"""Outputs with fixed names: what a command may write over, known before it computes.

A file is replaced where an earlier run of the same command listed it, in a hidden file beside it,
or where it is a result that says which command made it. Anything else is somebody's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cat_lm.core import __version__
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.own_files import Listing
from cat_lm.core.readers import read_json, read_object

PICTURES = (".png", ".svg")


def named(stem: str, *suffixes: str) -> list[str]:
    """Give the names of a result's files."""
    return [f"{stem}{suffix}" for suffix in suffixes]


def claim_outputs(
    out: Path | str, result: str, names: Iterable[str] = (), flag: str = "--out"
) -> None:
    """List the files that a command is about to write into `out`.

    Args:
        result: the JSON file of its numbers.
        names: of its other files.

    Raises:
        UserError: one is there and not of an earlier run.
    """
    out = Path(out)
    listing = out / f".{result}.files"
    listed = _listed(listing)
    names = list(dict.fromkeys([result, *names]))
    for name in names:
        path = out / name
        if os.path.lexists(path) and name not in listed and not is_result(path):
            raise UserError(
                f"{flag} {out}: {name} is not of an earlier run of this command and would be "
                "replaced; move it away or give another folder"
            )
    ours = Listing(format=1, program="cat_lm", files=sorted({*listed, *names}))
    write_text(listing, ours.model_dump_json(indent=1) + "\n")


def claim_file(path: Path | str, flag: str, command: str = "") -> None:
    """Check that a result may be written to `path`.

    Args:
        command: begins the command lines whose results are replaced; all of ours by default.

    Raises:
        UserError: something else is there, perhaps the input.
    """
    if os.path.lexists(path) and not is_result(Path(path), command):
        whose = f"`{command}`" if command else "ours"
        raise UserError(f"{flag} {path}: holds no earlier result of {whose}; give another file")


def write_result(path: Path, flag: str, command: str, values: dict[str, Any]) -> None:
    """Write a command's numbers to a file of its option `flag`, as a result that says so.

    Raises:
        UserError: something else is there.
    """
    claim_file(path, flag, command)
    made = {"command": command, "versions": {"cat_lm": __version__}}
    write_json(path, made | values)


def is_result(path: Path, command: str = "") -> bool:
    """Return True if a file is JSON that this program wrote: it says with what command."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        values = read_object(path)
    except UserError:
        return False
    made = values.get("provenance", values)
    is_ours = isinstance(made, dict) and {"command", "versions"} <= made.keys()
    return is_ours and str(made["command"]).startswith(command)


def _listed(listing: Path) -> list[str]:
    try:
        return read_json(listing, Listing).files
    except UserError:
        return []
