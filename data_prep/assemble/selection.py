"""Select the documents of the result, and the number of times that each occurs.

Every document has a hash place, which depends on its text and the seed. A subset of a set consists
of the documents with the lowest places. It is therefore uniform, the same on every machine and for
any order of files, and a smaller subset is part of a larger one. The subset for a number of tokens
ends with the document that reaches the number. Exact copies of a text have the same place, and are
ordered as in the input.

Up-sampling consists of whole repetitions and a subset. The repetitions follow one another: first
all documents once, then the documents that occur twice again, and so on.

A histogram of tokens by the upper bits of the hash places gives the bucket in which a subset ends.
Only the documents of this bucket are examined one by one, so that memory is small for any corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from cat_lm.core.errors import UserError
from data_prep.common.amounts import SelectionSpec
from data_prep.encode.encoding import PLACES, Coverage, Rules
from data_prep.encode.parts import Parts
from data_prep.encode.plan import MARGIN, place_for
from data_prep.sources.base import counted_with

BUCKET_BITS = 16


@dataclass(frozen=True)
class SubsetEnd:
    """The last document of a subset, which has all documents up to it in the order of places."""

    place: int
    unit: int
    position: int

    def contains(self, documents: np.ndarray, unit: int) -> np.ndarray:
        """Return a mask of the documents of a unit that are in the subset, bool [documents]."""
        below = documents["place"] < np.uint64(self.place)
        if unit > self.unit:
            return below
        level = documents["place"] == np.uint64(self.place)
        if unit == self.unit:
            level &= documents["position"] <= self.position
        return below | level


@dataclass(frozen=True)
class Copies:
    """The repetitions of a set's training documents: `whole` times all, then the subset `cut`."""

    whole: int
    cut: SubsetEnd | None = None


@dataclass
class Selection:
    """The selected documents: repetitions of each training set, and the sets for validation.

    Attributes:
        names: the names of all sets, in the order of their indices.
        train: set -> repetitions of its training documents; other sets are left out.
        validation: the sets whose validation documents are selected.
        ends: split -> (unit, position) of its last document under --max-documents or --max-bytes.
            Files without a split count as training data.
    """

    names: list[str]
    train: dict[str, Copies]
    validation: list[str]
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """Return the number of passes over the input for the training split."""
        copies = self.train.values()
        return max((own.whole + (own.cut is not None) for own in copies), default=0)

    def mask_before_limit(
        self, documents: np.ndarray, unit: int, unit_split: str | None
    ) -> np.ndarray:
        """Return a mask of the documents before the end that a limit sets, bool [documents]."""
        if (end := self.ends.get(counted_with(unit_split))) is None or unit < end[0]:
            return np.ones(len(documents), dtype=bool)
        if unit > end[0]:
            return np.zeros(len(documents), dtype=bool)
        return documents["position"] <= end[1]

    def select_indices(
        self, documents: np.ndarray, unit: int, unit_split: str | None, split: str, number: int
    ) -> np.ndarray:
        """Return the indices of a unit's documents in pass `number` (from 0) of a split."""
        taken = self.mask_before_limit(documents, unit, unit_split)
        taken &= (documents["validation"] != 0) == (split == "validation")
        if split == "validation":
            kept = np.array([name in self.validation for name in self.names], dtype=bool)
            return np.flatnonzero(taken & kept[documents["set"]])
        of_set = np.zeros(len(documents), dtype=bool)
        for index, name in enumerate(self.names):
            copies = self.train.get(name, Copies(0))
            members = documents["set"] == index
            if number == copies.whole and copies.cut is not None:
                of_set |= members & copies.cut.contains(documents, unit)
            elif number < copies.whole:
                of_set |= members
        return np.flatnonzero(taken & of_set)


class Shortage(Exception):
    """Raised if more must be encoded first: the training documents of sets below these places."""

    def __init__(self, places: dict[str, int]) -> None:
        sets = {name: (place, False) for name, place in places.items()}
        self.coverage = Coverage(sets, (0, False))


class DocumentSelector:
    """Select documents from `parts` according to `spec`.

    `coverage` describes the documents that are encoded. All documents below the place `held_out`
    are validation documents.
    """

    def __init__(
        self, spec: SelectionSpec, parts: Parts, coverage: Coverage, held_out: int
    ) -> None:
        self.spec = spec
        self.names = parts.names
        self.scan = parts.scan
        self.coverage = coverage
        self.held_out = held_out
        self.histograms = self._count_tokens()
        self.tokens = {name: int(h.sum()) for name, h in self.histograms.items()}

    def choose(self) -> Selection:
        """Return the selection.

        Raises:
            Shortage: more documents must be encoded, because an estimate was too low.
            UserError: the input has too few documents.
        """
        wanted = [name for name in self.names if self.spec.includes(name)]
        if self.spec.mixture is not None:
            train = self._select_mixture(wanted)
        elif self.spec.repeat is not None:
            train = self._select_repeats(wanted)
        elif self.spec.tokens is not None:
            train = self._select_budget(wanted)
        else:
            train = {name: Copies(1) for name in wanted}
        held_out = [name for name in self.names if self.spec.holds_out(name)]
        return Selection(self.names, train, held_out)

    def _select_budget(self, wanted: list[str]) -> dict[str, Copies]:
        budget = self.spec.tokens
        limit = min((self._covered(name) for name in wanted), default=PLACES)
        have = sum(self.tokens[name] for name in wanted)
        cut = self._find_subset_ends({"": (wanted, budget)})[""] if have >= budget else None
        if cut is not None and cut.place < limit:
            return {name: Copies(0, cut) for name in wanted}
        if limit < PLACES:
            further = self._extrapolate_place(limit, have, budget) if cut is None else cut.place + 1
            raise Shortage(dict.fromkeys(wanted, further))
        raise UserError(
            f"--tokens {budget}: the training split has {have:,} tokens; ask for fewer, or for "
            "repetitions with --mixture"
        )

    def _select_mixture(self, wanted: list[str]) -> dict[str, Copies]:
        shares = self.spec.shares()
        if self.spec.tokens is None:
            total = min(Fraction(self.tokens[name]) / shares[name] for name in wanted)
        else:
            total = Fraction(self.spec.tokens)
        targets = {name: ceil(total * shares[name]) for name in wanted}
        short = {
            name: self._extrapolate_place(self._covered(name), self.tokens[name], target)
            for name, target in targets.items()
            if self.tokens[name] < target and self._covered(name) < PLACES
        }
        if short:
            raise Shortage(short)
        for name, target in targets.items():
            self._check_repeats(name, target)
        return self._plan_copies(targets)

    def _select_repeats(self, wanted: list[str]) -> dict[str, Copies]:
        targets = {
            name: ceil(Fraction(self.spec.repeat.get(name, "1")) * self.tokens[name])
            for name in wanted
        }
        return self._plan_copies(targets)

    def _covered(self, name: str) -> int:
        return self.coverage.of(name)[0]

    def _check_repeats(self, name: str, target: int) -> None:
        have, most = self.tokens[name], self.spec.max_repeats
        if have == 0:
            raise UserError(f"--mixture {name}: the training split has no document of this set")
        if target > most * have:
            raise UserError(
                f"--mixture {name}={self.spec.mixture[name]}: {target:,} tokens are needed and "
                f"the set has {have:,}, it would be repeated {target / have:.2f} times; lower its "
                f"weight or --tokens, or give --max-repeats {ceil(Fraction(target, have))} "
                f"(now {most})"
            )

    def _plan_copies(self, targets: dict[str, int]) -> dict[str, Copies]:
        whole, rest = {}, {}
        for name, target in targets.items():
            have = self.tokens[name]
            whole[name], missing = divmod(target, have) if have else (0, 0)
            if missing:
                rest[name] = ([name], missing)
        cuts = self._find_subset_ends(rest)
        return {name: Copies(whole[name], cuts.get(name)) for name in targets}

    def _extrapolate_place(self, covered: int, have: int, need: int) -> int:
        """Return the place below which `need` tokens are expected, given `have` below `covered`."""
        scale = PLACES - self.held_out
        rate = Fraction(max(0, covered - self.held_out), scale)
        more = rate * Fraction(need, have) * MARGIN if have else Fraction(1)
        return place_for(more, self.held_out)

    def _count_tokens(self) -> dict[str, np.ndarray]:
        """Return the training tokens of each set by the upper bits of the places, int64."""
        shape = len(self.names), 1 << BUCKET_BITS
        found = np.zeros(shape, dtype=np.int64)
        for _, documents in self.scan():
            documents = documents[documents["validation"] == 0]
            np.add.at(found, (documents["set"], _bucket_of(documents)), documents["length"])
        return dict(zip(self.names, found, strict=True))

    def _find_subset_ends(self, groups: dict[str, tuple[list[str], int]]) -> dict[str, SubsetEnd]:
        """Return the last document of each group's subset, where a group is (sets, tokens)."""
        buckets, before = {}, {}
        for key, (sets, target) in groups.items():
            sums = np.cumsum(sum(self.histograms[name] for name in sets))
            buckets[key] = int(np.searchsorted(sums, target))
            before[key] = int(sums[buckets[key] - 1]) if buckets[key] else 0
        candidates: dict[str, list[np.ndarray]] = {key: [] for key in groups}
        for unit, documents in self.scan() if groups else ():
            documents = documents[documents["validation"] == 0]
            found = _bucket_of(documents)
            for key, (sets, _) in groups.items():
                members = [index for index, name in enumerate(self.names) if name in sets]
                inside = (found == buckets[key]) & np.isin(documents["set"], members)
                columns = [documents[name][inside] for name in ("place", "position", "length")]
                units = np.full(int(inside.sum()), unit)
                candidates[key].append(np.array([columns[0], units, *columns[1:]], np.uint64))
        cuts = {}
        for key, (_, target) in groups.items():
            rows = np.concatenate(candidates[key], axis=1)
            rows = rows[:, np.lexsort(rows[2::-1])]
            sums = before[key] + np.cumsum(rows[3].astype(np.int64))
            cuts[key] = SubsetEnd(*rows[:3, int(np.searchsorted(sums, target))].tolist())
        return cuts


def _bucket_of(documents: np.ndarray) -> np.ndarray:
    return (documents["place"] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def find_limit_ends(rules: Rules, parts: Parts) -> dict[str, tuple[int, int]]:
    """Return for each split the document that reaches --max-documents or --max-bytes."""
    ends: dict[str, tuple[int, int]] = {}
    counts: dict[str, list[int]] = {}
    for unit, documents in parts.scan() if rules.is_limited else ():
        split = parts.unit_splits[unit]
        counted = counted_with(split)
        seen = counts.setdefault(counted, [0, 0])
        for size, position in zip(documents["bytes"], documents["position"], strict=True):
            if counted in ends:
                break
            seen[0] += 1
            seen[1] += int(size)
            if rules.limit_reached(split, *seen):
                ends[counted] = (unit, int(position))
    return ends
