"""unfinished.json: what a preparation says of itself until its data are complete.

It lists every file that the preparation may have put into the output folder, before that file is
there; only these, and what the manifest of finished data lists, are ever deleted. Paths in it are
shown to people and used for nothing else. Files grow in a marked folder beside it, `.making.tmp`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from cat_lm.core.errors import UserError
from cat_lm.core.files import sync_directory, write_json
from cat_lm.core.folders import is_ours, make_temporary, remove_temporary
from cat_lm.core.readers import Versioned, read_json
from cat_lm.data.manifest import listed_shards
from cat_lm.data.packing import PACKING, plan_files
from cat_lm.data.verified import NOTE

MARKER = "unfinished.json"
PROGRAM = "cat_lm data_prep.prepare"
MALFORMED = "malformed.log"
TOKENIZER = "tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "sentencepiece.model")
MAKING = ".making.tmp"
_DATA = re.compile(
    rf"[A-Za-z0-9_][A-Za-z0-9._-]*\.(?:bin|idx)|{re.escape(MALFORMED)}|{re.escape(NOTE)}"
    rf"|{TOKENIZER}/(?:{'|'.join(map(re.escape, TOKENIZER_FILES))})"
    rf"|{PACKING}/[A-Za-z0-9.-]+"
    rf"(?:/(?:plan\.json|windows\.bin|pieces\.bin|{re.escape(NOTE)}))?"
)


def _check_data_name(name: str) -> str:
    if not _DATA.fullmatch(name) or ".." in name.split("/"):
        raise ValueError("must be a file that a preparation writes, such as train-00000.bin")
    return name


class Unfinished(Versioned):
    """A preparation under way: its arguments, what --scratch was, and the files it may have made"""

    program: Literal["cat_lm data_prep.prepare"]
    identity: dict[str, Any]
    scratch: str | None
    files: list[Annotated[str, AfterValidator(_check_data_name)]]

    def save(self, folder: Path) -> None:
        """Write it into the output folder."""
        with put(folder, MARKER) as path:
            write_json(path, self.model_dump())


def read_marker(folder: Path) -> Unfinished | None:
    """Read the marker in an output folder; None where there is none.

    Raises:
        UserError: the file is not what this version of the command writes.
    """
    path = folder / MARKER
    if not os.path.lexists(path):
        return None
    return read_json(path, Unfinished, "move it away")


def claim(folder: Path, names: Iterable[str]) -> None:
    """List files in the marker before they are made.

    Raises:
        UserError: one is there already and not of this preparation; it would be replaced.
    """
    marker = read_marker(folder)
    new = [name for name in dict.fromkeys(names) if name not in set(marker.files)]
    for name in new:
        if os.path.lexists(folder / name):
            raise UserError(
                f"--out {folder}: {name} is not of this preparation and would be replaced; move "
                "it away"
            )
    if new:
        marker.model_copy(update={"files": [*marker.files, *new]}).save(folder)


def is_making(path: Path) -> bool:
    """Return True if a path is the folder in which files grow, or one whose making a kill ended."""
    return path.name == MAKING and is_ours(path)


def remove_making(folder: Path) -> None:
    """Remove what grew and never became whole; what only has such a name stays."""
    if is_making(folder / MAKING):
        remove_temporary(folder / MAKING)


@contextmanager
def put(folder: Path, name: str) -> Iterator[Path]:
    """Yield a place to write a file to, which then gets its name in `folder`."""
    path = folder / MAKING / name
    make_temporary(path.parent)
    try:
        yield path
        os.replace(path, folder / name)
        sync_directory(folder)
    finally:
        remove_making(folder)


def shard_names(shards: Iterable[str]) -> list[str]:
    """Return the files of shards, by their names."""
    return [f"{name}{suffix}" for name in shards for suffix in (".bin", ".idx")]


def tokenizer_names() -> list[str]:
    """Return the files that a tokenizer may consist of."""
    return [f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES]


def finished_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return what a manifest lists, and what belongs to it; but for itself."""
    names = shard_names(shard["name"] for shard in listed_shards(manifest))
    names += [*tokenizer_names(), NOTE, *plan_files(folder)]
    return [*names, MALFORMED] if manifest.get("malformed_documents") else names
