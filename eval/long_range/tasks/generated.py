"""What generated tasks share: how many rows, by which seed, or the files that others generated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cat_lm.core.fields import changed_options
from eval.long_range.tasks.base import SPLITS, Task

SOURCES = ("generated", "official")


@dataclass(frozen=True)
class GeneratedTask(Task):
    """A task whose rows are made by a seed, or read from the files of the Long Range Arena.

    Test rows are made first, then those of validation, then of training: another number of
    training rows changes no other split.

    Attributes:
        source: generated; or official, files in `Place.folder`.
        train, validation, test: rows to generate.
        seed: of the generator.
    """

    source: str = "generated"
    train: int = 96_000
    validation: int = 2_000
    test: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source}: choose {' or '.join(SOURCES)}")
        if self.source == "official" and (changed := self._without_effect()):
            raise ValueError(f"{', '.join(changed)}: of the generator, without effect on files")
        for split in SPLITS:
            if getattr(self, split) < 1:
                raise ValueError(f"{split}={getattr(self, split)}: must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be at least 0")

    def _without_effect(self) -> list[str]:
        return [name for name in changed_options(self) if name != "source"]

    @property
    def reads_files(self) -> bool:
        return self.source == "official"

    @property
    def rows(self) -> dict[str, int]:
        """Return the rows of each split, in the order in which they are made."""
        return {split: getattr(self, split) for split in reversed(SPLITS)}

    def generator(self) -> dict[str, object]:
        """Return all that decides a generated row, without how many there are."""
        described = dataclasses.asdict(self)
        left_out = (*SPLITS, "source")
        kept = {name: value for name, value in described.items() if name not in left_out}
        return {"generator": self.name, "version": self.version, **kept}
