"""The work of a preparation in pieces: a unit is a group of consecutive input files.

The units follow from the listing alone: names, order and sizes. So every process on every machine
has the same ones, and a unit that one of them has encoded is done for all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from data_prep.sources import Part, Source

UNIT_BYTES = 256_000_000  # of input files; some minutes of one core
UNITS_AT_LEAST = 64  # as far as there are files, so that small sources have work for all cores


@dataclass(frozen=True)
class Unit:
    """Consecutive files of one split; `bytes` are theirs on disk."""

    number: int
    parts: tuple[Part, ...]
    bytes: int

    @property
    def split(self) -> str | None:
        return self.parts[0].split

    @property
    def listing_sha256(self) -> str:
        """The hash of what the unit consists of."""
        listing = "".join(f"{part.name} {part.size}\n" for part in self.parts)
        return hashlib.sha256(listing.encode()).hexdigest()


def units_of(source: Source) -> list[Unit]:
    """The units of a source. A file is never cut; one without a known size is a unit by itself."""
    sizes = [part.size or 0 for part in source.parts]
    target = min(UNIT_BYTES, sum(sizes) // UNITS_AT_LEAST)
    groups: list[tuple[list[Part], int]] = []
    for part, size in zip(source.parts, sizes, strict=True):
        if groups:
            parts, total = groups[-1]
            if size and total and part.split == parts[0].split and total + size <= target:
                parts.append(part)
                groups[-1] = (parts, total + size)
                continue
        groups.append(([part], size))
    return [Unit(number, tuple(parts), size) for number, (parts, size) in enumerate(groups)]


def task_units(units: list[Unit], task: tuple[int, int] | None) -> list[Unit]:
    """The units of task I of N: every N-th, beginning with unit I; all of them for None."""
    if task is None:
        return units
    index, count = task
    return units[index::count]
