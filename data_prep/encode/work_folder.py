"""The work folder of a preparation: its parts, and all that a restart needs to know.

It is only ever where the arguments say: `parts` in the output folder, or a folder of its own in
--scratch whose name follows from the output folder. It bears a mark. A copy of it (a backup,
another disk) is taken over where nothing is in it but what a preparation writes; and nothing else
is ever deleted there.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.own_files import (
    MARK,
    bears_mark,
    is_marked,
    make_marked,
    remove_files,
    remove_marked,
    take_over,
)
from cat_lm.core.readers import resolve

INSIDE = "parts"
ASSEMBLY = "assembly.json"  # the plan of the shards
_SHARDS = "shards/"
_PART = r"part-\d{5,}\.\d+\.(?:bin|docs|malformed|json)"
_PLANS = r"(?:plan|assembly)\.json"
_SHARD = r"shards/(?:train|validation)-\d{5,}\.(?:json|npy)"
_OURS = re.compile(rf"{_PART}|{_PLANS}|{_SHARD}|part-\d{{5,}}\.lock|{re.escape(MARK)}")
_TEMPORARY = re.compile(
    rf"(?:shards/)?\.(?:{_PART}|{_PLANS}|{_SHARD[7:]}|{re.escape(MARK)})\..+\.tmp"
)


@dataclass(frozen=True)
class WorkFolder:
    """A work folder that arguments name; `scratch` is what --scratch names, resolved."""

    path: Path
    scratch: str | None
    purpose: str

    @classmethod
    def of(cls, out: Path, scratch: Path | None) -> WorkFolder:
        """Name the work folder of a preparation into `out`; the same in every run."""
        place = resolve(out)
        if scratch is None:
            # Does not name the place: a preparation that is moved goes on where it is now.
            return cls(place / INSIDE, None, "the parts of the preparation in the folder above")
        name = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        folder = resolve(scratch)
        purpose = f"the parts of the preparation in {place}"
        return cls(folder / f"cat-lm-prepare-{name}", str(folder), purpose)

    def make(self) -> None:
        """Make the folder, empty. Raises UserError where something else stands there."""
        try:
            make_marked(self.path, self.purpose)
        except OSError as error:
            raise UserError(
                f"--scratch {self.path.parent}: cannot be written ({error.strerror})"
            ) from None

    def is_ours(self) -> bool:
        """Tell whether it is there and a preparation's own, or a copy of one."""
        if is_marked(self.path, self.purpose):
            return True
        return bears_mark(self.path, self.purpose) and not self._strangers()

    def take_up(self) -> None:
        """Make what was begun here, or in a folder that this is a copy of, this preparation's own.

        Raises:
            UserError: it is not a preparation's, or holds other files too.
        """
        if is_marked(self.path, self.purpose):
            return
        if self.path.is_symlink() or not self.path.is_dir():
            raise self._not_ours()
        if strangers := self._strangers():
            raise UserError(
                f"{self.path}: holds {strangers[0]!r}, which is not of a preparation; move it away"
            )
        # A kill may have left the folder between its mark's end and its own.
        if not (bears_mark(self.path, self.purpose) or self._files() in ([], [MARK])):
            raise self._not_ours()
        take_over(self.path, self.purpose)

    def _not_ours(self) -> UserError:
        return UserError(
            f"{self.path}: stands where the parts go, and was not made by this command; move it "
            "away"
        )

    def remove(self) -> None:
        """Delete the folder, where it is there, but for files that are not a preparation's.

        Raises:
            UserError: it is not a preparation's, or cannot be removed.
        """
        if not os.path.lexists(self.path):
            return
        self.take_up()
        if strangers := self._strangers():
            self._tell(strangers)
            remove_files(self.path, sorted({*self._files()} - {*strangers}))
            return
        remove_marked(self.path, self.purpose)

    def remove_shards(self) -> None:
        """Delete the records of finished shards, for which others are planned."""
        strangers = self._strangers()
        if within := [name for name in strangers if name.startswith(_SHARDS)]:
            self._tell(within)
        remove_files(
            self.path, [n for n in self._files() if n.startswith(_SHARDS) and n not in strangers]
        )

    def _tell(self, strangers: list[str]) -> None:
        print(f"note: {self.path}: {', '.join(strangers[:3])} is not of the preparation: stays")

    def remove_temporary(self) -> None:
        """Remove what killed processes have left between its making and its renaming."""
        remove_files(self.path, [name for name in self._files() if _TEMPORARY.fullmatch(name)])

    def _strangers(self) -> list[str]:
        return [n for n in self._files() if not (_OURS.fullmatch(n) or _TEMPORARY.fullmatch(n))]

    def _files(self) -> list[str]:
        """List all that is in the folder: what is in `shards` one by one, other folders as one."""
        found = []
        for name in sorted(os.listdir(self.path)):
            inner = self.path / name
            if name == "shards" and inner.is_dir() and not inner.is_symlink():
                found += [f"shards/{below}" for below in sorted(os.listdir(inner))]
            else:
                is_folder = inner.is_dir() and not inner.is_symlink()
                found.append(f"{name}/" if is_folder else name)
        return found
