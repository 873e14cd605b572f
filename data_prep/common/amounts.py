"""Parse option values: lists, weights of sets, limits, and the selection that they describe."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from cat_lm.core.cli import argument_type
from cat_lm.core.errors import UserError
from cat_lm.core.numbers import TOKENS, check_whole
from cat_lm.core.readers import clipped

_DECIMAL = r"[0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40}"


@argument_type
def parse_split_sizes(text: str) -> list[int]:
    """Parse the sizes of two or three splits, N,N or N,N,N."""
    sizes = text.split(",")
    if len(sizes) not in (2, 3):
        raise ValueError("must be two or three numbers, such as 90M,5M,5M")
    return [check_whole(size.strip(), TOKENS.at_least(1)) for size in sizes]


@argument_type
def parse_names(text: str) -> list[str]:
    """Parse NAME,NAME into a sorted list without repetitions."""
    found = sorted({name.strip() for name in text.split(",")} - {""})
    if not found:
        raise ValueError("must be names or patterns, with commas between them")
    return found


@argument_type
def parse_numbers_by_set(text: str) -> dict[str, str]:
    """Parse SET=NUMBER,… into {set: text of a positive decimal number}, sorted by name."""
    found: dict[str, str] = {}
    for item in text.split(","):
        name, _, number = (piece.strip() for piece in item.partition("="))
        positive = re.fullmatch(_DECIMAL, number) and Fraction(number) > 0
        if not name or not positive or name in found:
            raise ValueError(
                "must be SET=NUMBER with a positive number, each set once (such as "
                f"RedPajamaC4=0.6,RedPajamaBook=0.4), which {clipped(item.strip())!r} is not"
            )
        found[name] = number
    return dict(sorted(found.items()))


@argument_type
def parse_task(text: str) -> tuple[int, int]:
    """Parse I/N, task I of N, into (I, N)."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError("must be I/N, with I from 0 to N - 1")
    return int(match[1]), int(match[2])


@argument_type
def parse_separator(text: str) -> str:
    """Parse a separator as it is typed in a shell: backslash and n mean a line end."""
    try:
        found = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        found = ""
    if not found:
        raise ValueError(r"must be some text, such as '\n\n'")
    return found


@argument_type
def parse_key_path(text: str) -> str:
    """Check a key, or several keys with dots between them, and return it."""
    if not all(text.split(".")):
        raise ValueError("must be a key, or several with dots between")
    return text


class Limit(NamedTuple):
    """The number of malformed records that is tolerated: `count` plus `share` of all records."""

    text: str
    count: int = 0
    share: Fraction = Fraction(0)

    def exceeded(self, malformed: int, records: int) -> bool:
        """Return True if `malformed` of `records` records are too many."""
        return malformed > self.count + self.share * records


@argument_type
def parse_limit(text: str) -> Limit:
    """Parse a `Limit` such as `100` or `0.01%`."""
    number = text.strip().removesuffix("%")
    if text.strip() != number and re.fullmatch(_DECIMAL, number) and Fraction(number) <= 100:
        return Limit(text, share=Fraction(number) / 100)
    if text.strip() != number or not re.fullmatch("[0-9]{1,40}", number):
        raise ValueError("must be a number of lines or a share such as 0.01%")
    return Limit(text, count=int(number))


@dataclass(frozen=True)
class SelectionSpec:
    """The sets, amounts and repetitions that the options of a command describe."""

    sets: Collection[str] | None = None
    exclude: Collection[str] = ()
    tokens: int | None = None
    mixture: dict[str, str] | None = None
    repeat: dict[str, str] | None = None
    max_repeats: int = 4

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> SelectionSpec:
        """Return the selection of parsed arguments."""
        exclude = arguments.exclude_sets or ()
        amounts = (arguments.tokens, arguments.mixture, arguments.repeat, arguments.max_repeats)
        return cls(arguments.sets, exclude, *amounts)

    def includes(self, name: str) -> bool:
        """Return True if training documents of this set are wanted."""
        return self.holds_out(name) and (self.mixture is None or name in self.mixture)

    def holds_out(self, name: str) -> bool:
        """Return True if validation documents of this set are wanted, regardless of --mixture."""
        return (self.sets is None or name in self.sets) and name not in self.exclude

    @property
    def named(self) -> list[tuple[str, str]]:
        """Return the (flag, set) pairs of all sets that options name."""
        flags = {
            "--sets": self.sets or (),
            "--exclude-sets": self.exclude,
            "--mixture": self.mixture or (),
            "--repeat": self.repeat or (),
        }
        return [(flag, name) for flag, found in flags.items() for name in found]

    def check_names(self, there: Collection[str]) -> None:
        """Raise UserError if an option names a set that the input does not have."""
        for flag, name in self.named:
            if name not in there:
                raise UserError(f"{flag} {name}: no such set; there are {', '.join(sorted(there))}")

    def shares(self) -> dict[str, Fraction]:
        """Return the mixture's weights, normalized to a sum of 1."""
        weights = {name: Fraction(weight) for name, weight in self.mixture.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}
