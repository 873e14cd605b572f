"""The work folder of a preparation: its parts, and all that a restart needs to know.

It is only ever where the arguments say: `parts` in the output folder, or a folder in --scratch
whose name follows from the output folder. It is a temporary folder (`cat_lm.core.folders`), from
which only files with the names of a preparation's are ever deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.folders import MARK, is_marked, make_temporary, remove_temporary
from cat_lm.core.outputs import remove_files
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

    @classmethod
    def of(cls, out: Path, scratch: Path | None) -> WorkFolder:
        """Name the work folder of a preparation into `out`; the same in every run."""
        place = resolve(out)
        if scratch is None:
            return cls(place / INSIDE, None)
        name = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        folder = resolve(scratch)
        return cls(folder / f"cat-lm-prepare-{name}", str(folder))

    def make(self) -> None:
        """Make the folder, or take up what is in it. Raises UserError where it is not ours."""
        try:
            make_temporary(self.path)
        except OSError as error:
            flag = "--scratch" if self.scratch else "--out"
            raise UserError(
                f"{flag} {self.path.parent}: cannot be written ({error.strerror})"
            ) from None

    def is_ours(self) -> bool:
        """Return True if it is there and a preparation's own."""
        return is_marked(self.path)

    def remove(self) -> None:
        """Delete the folder, where it is there, but for files that are not a preparation's.

        Raises:
            UserError: it is not a preparation's, or cannot be removed.
        """
        if not os.path.lexists(self.path):
            return
        self.make()
        if strangers := self._strangers():
            self._tell(strangers)
            remove_files(self.path, sorted({*self._files()} - {*strangers, MARK}))
            return
        remove_temporary(self.path)

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
