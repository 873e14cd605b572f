"""Amounts as they are typed: 15B tokens, a weight for each set, a number or share of lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import TOKENS, check_whole

_MOST_CHARACTERS = 40


def amount(flag: str, text: str) -> int:
    """Read a count such as 500000000, 5e8, 500M or 15B (10^9). Raises UserError for others."""
    try:
        return check_whole(text, TOKENS.at_least(1))
    except ValueError as error:
        raise UserError(f"{flag} {cut(text)}: {error}") from None


def split_sizes(flag: str, text: str) -> list[int]:
    """Read the sizes of two or three splits, N,N or N,N,N. Raises UserError for others."""
    sizes = text.split(",")
    if len(sizes) not in (2, 3):
        raise UserError(f"{flag} {cut(text)}: give two or three numbers, such as 90M,5M,5M")
    return [amount(flag, size.strip()) for size in sizes]


def cut(text: str) -> str:
    """Shorten what was typed to what a line can show."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _match(pattern: str, text: str) -> re.Match[str] | None:
    """Match all of a text that is short enough to be a number that can be meant."""
    return re.fullmatch(pattern, text.strip()) if len(text) <= _MOST_CHARACTERS else None


def names(flag: str, text: str, what: str = "the names of sets") -> list[str]:
    """NAME,NAME as a sorted list without repetitions. Raises UserError where there is none."""
    found = sorted({name.strip() for name in text.split(",")} - {""})
    if not found:
        raise UserError(f"{flag} {text!r}: give {what}, with commas between them")
    return found


def patterns(flag: str, text: str) -> list[str]:
    """Read GLOB,GLOB, as `names` does."""
    return names(flag, text, "patterns such as encodings/*")


def numbers_by_set(flag: str, text: str) -> dict[str, str]:
    """SET=NUMBER,… with positive decimal numbers, kept as they were typed, sorted by name."""
    found: dict[str, str] = {}
    for item in text.split(","):
        name, equals, number = (piece.strip() for piece in item.partition("="))
        good = _match(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", number) and Fraction(number) > 0
        if not name or not equals or not good or name in found:
            raise UserError(
                f"{flag} {cut(text)}: {cut(item.strip())!r} is not SET=NUMBER with a positive "
                "number, each set once (such as RedPajamaC4=0.6,RedPajamaBook=0.4)"
            )
        found[name] = number
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Limit:
    """The malformed records that are borne: a number of them, or a share of all records."""

    text: str
    count: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, flag: str, text: str) -> Limit:
        """From `100` or `0.01%`. Raises `UserError` for anything else."""
        match = _match(r"([0-9]+(?:\.[0-9]+)?)%", text)
        if match and Fraction(match[1]) <= 100:
            return cls(text, share=Fraction(match[1]) / 100)
        if _match(r"[0-9]+", text):
            return cls(text, count=int(text))
        raise UserError(f"{flag} {cut(text)}: give a number of lines or a share such as 0.01%")

    def exceeded(self, malformed: int, records: int) -> bool:
        """Return True if so many malformed ones among `records` (they included) are too many."""
        if self.count is not None:
            return malformed > self.count
        return malformed > self.share * records
