"""A cache of results: a folder with one JSON file for each computed cell.

A cell is named by what decides its numbers, written whole or not at all with a checksum of its
values, and checked when it is read, so that a command which was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import unseal, write_sealed
from cat_lm.core.folders import check_file
from cat_lm.core.readers import Versioned, check_shape, parse_value, read_bytes, short


def key_hash(key: Mapping[str, Any], digits: int = 16) -> str:
    """Return the hash of a key, which may hold any JSON values."""
    text = json.dumps(key, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


_AGAIN = "delete it, and the same command makes it again"


class DamagedCell(UserError):
    """A file is no cell of its store, or was changed."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: damaged: {why}; {_AGAIN}")


@dataclass(frozen=True)
class CellStore:
    """A folder of cells.

    Attributes:
        shape: schema with the least content of every cell.
    """

    folder: Path
    shape: type[Versioned]

    def path(self, name: str) -> Path:
        """Return FOLDER/NAME.json."""
        return self.folder / f"{name}.json"

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Write a cell atomically, together with its format version."""
        write_sealed(self.path(name), {"format": 1, **values})

    def read(
        self, name: str, fits: Callable[[dict[str, Any]], bool] = lambda values: True
    ) -> dict[str, Any] | None:
        """Return a cell's values without its format version; None if there is no file.

        Args:
            fits: whether values that have the shape are those of the cell that is asked for.

        Raises:
            DamagedCell: its file holds something else, or not what was written.
            UserError: its file may not be read or is another version's, or none can be written in
                its place.
        """
        path = self.path(name)
        if not path.is_file():
            check_file(path)  # Check write access before hours of work.
            return None
        text = read_bytes(path)  # A file that cannot be read does not count as damaged.
        try:
            values = parse_value(text, str(path))
            if not isinstance(values, dict):
                raise UserError(f"{path}: holds {short(values)}, must be an object")
        except UserError as error:
            raise DamagedCell(path, str(error).removeprefix(f"{path}: ")) from None
        # A file of another version is not damaged, and is not replaced.
        check_shape(values, Versioned, str(path), _AGAIN)
        values, whole = unseal(values)
        if not whole:
            raise DamagedCell(path, "was changed after it was written")
        check_shape(values, self.shape, str(path), _AGAIN)
        del values["format"]
        if not fits(values):
            raise DamagedCell(path, "is of something else")
        return values

    def read_intact(
        self, name: str, fits: Callable[[dict[str, Any]], bool] = lambda values: True
    ) -> dict[str, Any] | None:
        """Return a cell that is cheap to compute again; None, with a warning, if it is damaged."""
        try:
            return self.read(name, fits)
        except DamagedCell:
            print(f"{self.path(name)}: damaged, is computed again", file=sys.stderr)
            return None

    def computed(
        self, key: dict[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the cell of a key; compute and store it if there is no intact one."""
        name = key_hash(key)
        values = self.read_intact(name, lambda values: key.items() <= values.items())
        if values is None:
            values = key | compute()
            self.write(name, values)
        return values
