"""Making the selection that is asked for: from the documents that are encoded, to the token.

A histogram of tokens by the upper bits of the hash places tells the bucket in which a subset ends,
and only the documents of that bucket are looked at one by one; so memory is small for any corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from math import ceil

import numpy as np

from cat_lm.core.errors import UserError
from data_prep.assemble.selection import Copies, Selection, SubsetEnd
from data_prep.common.selection_spec import SelectionSpec
from data_prep.encode.encoding import PLACES
from data_prep.encode.plan import MARGIN, Shortage, place_for

BUCKET_BITS = 16


# A unit's number and its documents, for every unit in order; gone through more than once.
Scan = Callable[[], Iterable[tuple[int, np.ndarray]]]


class Chooser:
    """Makes the selection that `spec` asks for out of what has been encoded.

    `covered(name)` says below which place the training documents of a set are encoded;
    `held_out` is the place below which all are held out.
    """

    def __init__(
        self,
        spec: SelectionSpec,
        names: list[str],
        scan: Scan,
        covered: Callable[[str], int],
        held_out: int,
    ) -> None:
        self.spec = spec
        self.names = names
        self.scan = scan
        self.covered = covered
        self.held_out = held_out
        self.histograms = self._histograms()
        self.tokens = {name: int(h.sum()) for name, h in self.histograms.items()}

    def choose(self) -> Selection:
        """Raises `Shortage` where more must be encoded, `UserError` where there is not enough."""
        wanted = [name for name in self.names if self.spec.includes(name)]
        if self.spec.mixture is not None:
            train = self._mixture(wanted)
        elif self.spec.repeat is not None:
            train = self._repeated(wanted)
        elif self.spec.tokens is not None:
            train = self._budget(wanted)
        else:
            self._need_all(wanted)  # a budget of earlier arguments may have left some out
            train = {name: Copies(1) for name in wanted}
        held_out = [name for name in self.names if self.spec.holds_out(name)]
        return Selection(self.names, train, held_out)

    def _budget(self, wanted: list[str]) -> dict[str, Copies]:
        budget = self.spec.tokens
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
        shares = self.spec.shares()
        if self.spec.tokens is None:
            self._need_all(wanted)
            total = min(Fraction(self.tokens[name]) / shares[name] for name in wanted)
        else:
            total = Fraction(self.spec.tokens)
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
            name: ceil(Fraction(self.spec.repeat.get(name, "1")) * self.tokens[name])
            for name in wanted
        }
        return self._copies(targets)

    def _need_all(self, wanted: list[str]) -> None:
        short = {name: PLACES for name in wanted if self.covered(name) < PLACES}
        if short:
            raise Shortage(short, 0)

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

    def _cuts(self, groups: dict[str, tuple[list[str], int]]) -> dict[str, SubsetEnd]:
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
            cuts[key] = SubsetEnd(place, unit, position)
        return cuts


def _buckets(documents: np.ndarray) -> np.ndarray:
    return (documents["place"] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
