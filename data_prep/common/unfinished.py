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
from cat_lm.core.own_files import (
    bears_mark,
    is_marked,
    is_only_begun,
    make_marked,
    remove_marked,
    set_aside,
)
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
_MAKING_PURPOSE = "prepared data on their way"
TOKENIZER_PURPOSE = "a tokenizer on its way"  # of the folder in which it is made
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


def make_making(folder: Path) -> Path:
    """Make the folder in which files grow until they are whole; it is marked as ours."""
    place = folder / MAKING
    if bears_mark(place, _MAKING_PURPOSE) and not is_marked(place, _MAKING_PURPOSE):
        # Came along with a copy of the folder above: what is in it is of no use here.
        print(f"note: {place} is a copy of unfinished files; it is now {set_aside(place).name}")
    make_marked(place, _MAKING_PURPOSE)
    return place


def is_making(path: Path) -> bool:
    """Tell whether a path is what `make_making` made or began to make, or a copy of it."""
    return path.name == MAKING and (bears_mark(path, _MAKING_PURPOSE) or is_only_begun(path))


def remove_making(folder: Path) -> None:
    """Remove what grew and never became whole; what only has such a name stays."""
    place = folder / MAKING
    if is_marked(place, _MAKING_PURPOSE) or is_only_begun(place):
        remove_marked(place, _MAKING_PURPOSE)


@contextmanager
def put(folder: Path, name: str) -> Iterator[Path]:
    """Yield a place to write a file to, which then gets its name in `folder`."""
    path = make_making(folder) / name
    try:
        yield path
        os.replace(path, folder / name)
        sync_directory(folder)
    finally:
        remove_making(folder)


def shard_names(shards: Iterable[str]) -> list[str]:
    """Give the files of shards, by their names."""
    return [f"{name}{suffix}" for name in shards for suffix in (".bin", ".idx")]


def tokenizer_names() -> list[str]:
    """Give the files that a tokenizer may consist of."""
    return [f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES]


def finished_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Give what a manifest lists, and what belongs to it; but for itself."""
    names = shard_names(shard["name"] for shard in listed_shards(manifest))
    names += [*tokenizer_names(), NOTE, *plan_files(folder)]
    return [*names, MALFORMED] if manifest.get("malformed_documents") else names
