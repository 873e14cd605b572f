"""The exact documents of the result, and the number of times that each occurs.

Every document has a hash place (its text and the seed decide it). A subset of a set is the
documents with the lowest places; so it is uniform, the same on every machine and in any order of
the files, and a smaller one lies within a larger one. The subset for a number of tokens ends with
the document that reaches the number. Exact copies of a text share a place and are told apart by
their order in the input.

Up-sampling is whole repetitions and a subset. The repetitions follow one another: first every
document once, then again those that come twice, and so on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from data_prep.sources.base import counted_with


@dataclass(frozen=True)
class SubsetEnd:
    """The last document of a subset; those at lower places, and it itself, are in it."""

    place: int
    unit: int
    position: int

    def takes(self, documents: np.ndarray, unit: int) -> np.ndarray:
        """Return which of a unit's documents are in the subset, bool [documents]."""
        below = documents["place"] < np.uint64(self.place)
        if unit > self.unit:
            return below
        level = documents["place"] == np.uint64(self.place)
        if unit == self.unit:
            level &= documents["position"] <= self.position
        return below | level


@dataclass(frozen=True)
class Copies:
    """The repetitions of a set's training documents: `whole` times, once more up to `cut`."""

    whole: int
    cut: SubsetEnd | None = None


@dataclass
class Selection:
    """The training documents by set (no entry: none of them), and the sets of the held-out ones.

    `ends`: where --max-documents or --max-bytes ends the input of a split (files without one count
    with the training split), as a unit and the last position in it.
    """

    names: list[str]
    train: dict[str, Copies]
    validation: list[str]
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """Return how often the input is gone through for the training split."""
        counts = (copies.whole + (copies.cut is not None) for copies in self.train.values())
        return max(counts, default=0)

    def within(self, documents: np.ndarray, unit: int, unit_split: str | None) -> np.ndarray:
        """Return which documents lie before the end that a limit sets, bool [documents]."""
        if (end := self.ends.get(counted_with(unit_split))) is None or unit < end[0]:
            return np.ones(len(documents), dtype=bool)
        if unit > end[0]:
            return np.zeros(len(documents), dtype=bool)
        return documents["position"] <= end[1]

    def chosen(
        self, documents: np.ndarray, unit: int, unit_split: str | None, split: str, number: int
    ) -> np.ndarray:
        """Indices of the documents of a unit that pass `number` (from 0) of a split takes."""
        taken = self.within(documents, unit, unit_split)
        taken &= (documents["validation"] != 0) == (split == "validation")
        if split == "validation":
            kept = np.array([name in self.validation for name in self.names], dtype=bool)
            return np.flatnonzero(taken & kept[documents["set"]])
        of_set = np.zeros(len(documents), dtype=bool)
        for index, name in enumerate(self.names):
            copies = self.train.get(name)
            if copies is None or number > copies.whole:
                continue
            members = documents["set"] == index
            if number == copies.whole:
                if copies.cut is None:
                    continue
                members &= copies.cut.takes(documents, unit)
            of_set |= members
        return np.flatnonzero(taken & of_set)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> Selection:
        train = {
            name: Copies(copies["whole"], copies["cut"] and SubsetEnd(**copies["cut"]))
            for name, copies in value["train"].items()
        }
        ends = {split: tuple(end) for split, end in value["ends"].items()}
        return cls(value["names"], train, value["validation"], ends)
