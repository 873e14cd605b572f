"""The documents that a command line asks for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from cat_lm.core.errors import UserError


@dataclass(frozen=True)
class SelectionSpec:
    """The sets, amounts and repetitions that a command line asks for."""

    sets: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    tokens: int | None = None
    mixture: dict[str, str] | None = None
    repeat: dict[str, str] | None = None
    max_repeats: int = 4

    def includes(self, name: str) -> bool:
        """Return True if training documents of this set are wanted."""
        return self.holds_out(name) and (self.mixture is None or name in self.mixture)

    def holds_out(self, name: str) -> bool:
        """Return True if held-out documents of this set are wanted, whatever mixture or budget."""
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

    def check_names(self, there: Collection[str]) -> None:
        """Raises `UserError` where a set is named that is not among those of the input."""
        for flag, name in self.named:
            if name not in there:
                raise UserError(f"{flag} {name}: no such set; there are {', '.join(sorted(there))}")

    def shares(self) -> dict[str, Fraction]:
        """The mixture's weights, adding up to 1."""
        weights = {name: Fraction(weight) for name, weight in self.mixture.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}
