"""Which documents the result consists of, exactly, and how often each of them occurs.

Every document has a hash place (its text and the seed decide it). A subset of a set is the
documents with the lowest places; so it is uniform, the same on every machine and in any order of
the files, and a smaller one lies within a larger one. The subset for a number of tokens ends with
the document that reaches the number. Exact copies of a text share a place and are told apart by
their order in the input.

Up-sampling is whole repetitions and a subset. The repetitions follow one another: first every
document once, then again those that come twice, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from cat_lm.errors import UserError
from data_prep.encode import PLACES

BUCKET_BITS = 16
MARGIN = Fraction(5, 4)  # how much more is encoded than an estimate says is needed
ALMOST_ALL = Fraction(4, 5)  # from this share on all is encoded: a second round costs more


@dataclass(frozen=True)
class Cut:
    """The last document of a subset; those at lower places, and it itself, are in it."""

    place: int
    unit: int
    position: int

    def takes(self, documents: np.ndarray, unit: int) -> np.ndarray:
        """Which of a unit's documents are in the subset, bool [documents]."""
        below = documents["place"] < np.uint64(self.place)
        if unit > self.unit:
            return below
        level = documents["place"] == np.uint64(self.place)
        if unit == self.unit:
            level &= documents["position"] <= self.position
        return below | level


@dataclass(frozen=True)
class Copies:
    """How often the training documents of a set occur: `whole` times, once more up to `cut`."""

    whole: int
    cut: Cut | None = None


@dataclass
class Selection:
    """The training documents by set (no entry: none of them), and the sets of the held-out ones.

    `ends`: where --max-documents or --max-bytes ends the input of a split (None: of files that are
    not of a split), as a unit and the last position in it.
    """

    names: list[str]
    train: dict[str, Copies]
    validation: list[str]
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """How often the input is gone through for the training split."""
        counts = (copies.whole + (copies.cut is not None) for copies in self.train.values())
        return max(counts, default=0)

    def within(self, documents: np.ndarray, unit: int, unit_split: str | None) -> np.ndarray:
        """Which documents lie before the end that a limit sets, bool [documents]."""
        if (end := self.ends.get(str(unit_split))) is None or unit < end[0]:
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
            name: Copies(copies["whole"], copies["cut"] and Cut(**copies["cut"]))
            for name, copies in value["train"].items()
        }
        ends = {split: tuple(end) for split, end in value["ends"].items()}
        return cls(value["names"], train, value["validation"], ends)


class Shortage(Exception):
    """More has to be encoded first: the places below `sets[name]`, below `other` in other sets."""

    def __init__(self, sets: dict[str, int], other: int) -> None:
        self.sets = sets
        self.other = other


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for, and nothing else."""

    sets: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    tokens: int | None = None
    mixture: dict[str, str] | None = None
    repeat: dict[str, str] | None = None
    max_repeats: int = 4

    def includes(self, name: str) -> bool:
        """Whether training documents of this set are wanted."""
        return self.holds_out(name) and (self.mixture is None or name in self.mixture)

    def holds_out(self, name: str) -> bool:
        """Whether held-out documents of this set are wanted: mixtures and budgets leave them be."""
        return (self.sets is None or name in self.sets) and name not in self.exclude

    @property
    def named(self) -> list[tuple[str, str]]:
        """Every set that is named, with its flag."""
        flags = {
            "--sets": self.sets or (),
            "--exclude-sets": self.exclude,
            "--mixture": self.mixture or (),
            "--repeat": self.repeat or (),
        }
        return [(flag, name) for flag, found in flags.items() for name in found]

    def shares(self) -> dict[str, Fraction]:
        """The mixture's weights, adding up to 1."""
        weights = {name: Fraction(weight) for name, weight in self.mixture.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}


# A unit's number and its documents, for every unit in order; gone through more than once.
Scan = Callable[[], Iterable[tuple[int, np.ndarray]]]


class Chooser:
    """Makes the selection that `wishes` ask for out of what has been encoded.

    `covered(name)` says below which place the training documents of a set are encoded;
    `held_out` is the place below which all are held out.
    """

    def __init__(
        self,
        wishes: Wishes,
        names: list[str],
        scan: Scan,
        covered: Callable[[str], int],
        held_out: int,
    ) -> None:
        self.wishes = wishes
        self.names = names
        self.scan = scan
        self.covered = covered
        self.held_out = held_out
        self.histograms = self._histograms()
        self.tokens = {name: int(h.sum()) for name, h in self.histograms.items()}

    def choose(self) -> Selection:
        """Raises `Shortage` where more must be encoded, `UserError` where there is not enough."""
        wanted = [name for name in self.names if self.wishes.includes(name)]
        if self.wishes.mixture is not None:
            train = self._mixture(wanted)
        elif self.wishes.repeat is not None:
            train = self._repeated(wanted)
        elif self.wishes.tokens is not None:
            train = self._budget(wanted)
        else:
            train = {name: Copies(1) for name in wanted}
        held_out = [name for name in self.names if self.wishes.holds_out(name)]
        return Selection(self.names, train, held_out)

    def _budget(self, wanted: list[str]) -> dict[str, Copies]:
        budget = self.wishes.tokens
        limit = min((self.covered(name) for name in wanted), default=PLACES)
        have = sum(self.tokens[name] for name in wanted)
        cut = self._cuts({"": (wanted, budget)})[""] if have >= budget else None
        if cut is not None and cut.place < limit:
            return {name: Copies(0, cut) for name in wanted}
        if limit < PLACES:
            further = self._further(limit, have, budget) if cut is None else cut.place + 1
            raise Shortage({}, further)
        raise UserError(
            f"--tokens {budget}: the training split has {have:,} tokens; ask for fewer, or for "
            "repetitions with --mixture"
        )

    def _mixture(self, wanted: list[str]) -> dict[str, Copies]:
        shares = self.wishes.shares()
        if self.wishes.tokens is None:
            self._need_all(wanted)
            total = min(Fraction(self.tokens[name]) / shares[name] for name in wanted)
        else:
            total = Fraction(self.wishes.tokens)
        targets = {name: ceil(total * shares[name]) for name in wanted}
        short = {
            name: self._further(self.covered(name), self.tokens[name], targets[name])
            for name in wanted
            if self.tokens[name] < targets[name] and self.covered(name) < PLACES
        }
        if short:
            raise Shortage(short, 0)
        for name, target in targets.items():
            self._check_repeats(name, target)
        return self._copies(targets)

    def _repeated(self, wanted: list[str]) -> dict[str, Copies]:
        self._need_all(wanted)
        targets = {
            name: ceil(Fraction(self.wishes.repeat.get(name, "1")) * self.tokens[name])
            for name in wanted
        }
        return self._copies(targets)

    def _need_all(self, wanted: list[str]) -> None:
        short = {name: PLACES for name in wanted if self.covered(name) < PLACES}
        if short:
            raise Shortage(short, 0)

    def _check_repeats(self, name: str, target: int) -> None:
        have, most = self.tokens[name], self.wishes.max_repeats
        if have == 0:
            raise UserError(f"--mixture {name}: the training split has no document of this set")
        if target > most * have:
            raise UserError(
                f"--mixture {name}={self.wishes.mixture[name]}: {target:,} tokens are needed and "
                f"the set has {have:,}, it would be repeated {target / have:.2f} times; lower its "
                f"weight or --tokens, or give --max-repeats {ceil(Fraction(target, have))} "
                f"(now {most})"
            )

    def _copies(self, targets: dict[str, int]) -> dict[str, Copies]:
        whole, rest = {}, {}
        for name, target in targets.items():
            have = self.tokens[name]
            whole[name], missing = divmod(target, have) if have else (0, 0)
            if missing:
                rest[name] = ([name], missing)
        cuts = self._cuts(rest)
        return {name: Copies(whole[name], cuts.get(name)) for name in targets}

    def _further(self, covered: int, have: int, need: int) -> int:
        """The place below which to encode so that `need` tokens are found, `have` being below."""
        scale = PLACES - self.held_out
        rate = Fraction(max(0, covered - self.held_out), scale)
        more = rate * Fraction(need, have) * MARGIN if have else Fraction(1)
        return place_for(more, self.held_out)

    def _histograms(self) -> dict[str, np.ndarray]:
        """Tokens of the training documents of each set by the upper bits of their places."""
        found = {name: np.zeros(1 << BUCKET_BITS, dtype=np.int64) for name in self.names}
        for _, documents in self.scan():
            documents = documents[documents["validation"] == 0]
            buckets = _buckets(documents)
            for index in np.unique(documents["set"]).tolist():
                members = documents["set"] == index
                sums = np.bincount(
                    buckets[members], documents["length"][members], minlength=1 << BUCKET_BITS
                )
                found[self.names[index]] += sums.astype(np.int64)
        return found

    def _cuts(self, groups: dict[str, tuple[list[str], int]]) -> dict[str, Cut]:
        """For each group (sets, tokens): the document that reaches the tokens."""
        buckets, before = {}, {}
        for key, (sets, target) in groups.items():
            sums = np.cumsum(sum(self.histograms[name] for name in sets))
            buckets[key] = int(np.searchsorted(sums, target))
            before[key] = int(sums[buckets[key] - 1]) if buckets[key] else 0
        candidates: dict[str, list[np.ndarray]] = {key: [] for key in groups}
        for unit, documents in self.scan() if groups else ():
            documents = documents[documents["validation"] == 0]
            found = _buckets(documents)
            for key, (sets, _) in groups.items():
                inside = documents[found == buckets[key]]
                members = [index for index, name in enumerate(self.names) if name in sets]
                inside = inside[np.isin(inside["set"], members)]
                rows = np.empty((len(inside), 4), dtype=np.uint64)
                for column, values in enumerate((inside["place"], unit, inside["position"])):
                    rows[:, column] = values
                rows[:, 3] = inside["length"]
                candidates[key].append(rows)
        cuts = {}
        for key, (_, target) in groups.items():
            rows = np.concatenate(candidates[key])
            rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
            sums = before[key] + np.cumsum(rows[:, 3].astype(np.int64))
            place, unit, position, _ = rows[int(np.searchsorted(sums, target))].tolist()
            cuts[key] = Cut(place, unit, position)
        return cuts


def _buckets(documents: np.ndarray) -> np.ndarray:
    return (documents["place"] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def place_for(rate: Fraction, held_out: int) -> int:
    """The place below which this share of the training documents lies; `PLACES` for almost all."""
    if rate >= ALMOST_ALL:
        return PLACES
    return held_out + ceil(rate * (PLACES - held_out))
