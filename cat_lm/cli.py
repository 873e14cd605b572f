"""Kinds of arguments for the commands' parsers: what they refuse is one line, exit code 2.

A kind is a function for argparse's `type=`; its ranges are those of `cat_lm.limits`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cat_lm.limits import Range

# More digits than any range has.
_MOST_CHARACTERS = 40


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what it refuses, as `cat_lm.errors.command` does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows the options)\n")


def whole(allowed: Range) -> Callable[[str], int]:
    """Make a kind for whole numbers of a range: 20, 1_000."""

    def parse(text: str) -> int:
        plain = text.strip().replace("_", "")
        if len(plain) > _MOST_CHARACTERS or not re.fullmatch(r"[+-]?[0-9]+", plain):
            raise argparse.ArgumentTypeError(f"{_short(text)} must be a whole number")
        return _within(int(plain), allowed, text)

    return parse


def path(text: str) -> Path:
    """Take a path; the empty one, which would be the current folder, is none."""
    if not text or text != text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{_short(text)} is no path")
    return Path(text)


def number(allowed: Range, *, above: float | None = None) -> Callable[[str], float]:
    """Make a kind for numbers of a range; with `above`, that bound itself is not allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text) if len(text) <= _MOST_CHARACTERS else None
        except ValueError:
            value = None
        if value is None:
            raise argparse.ArgumentTypeError(f"{_short(text)} must be a number")
        if above is not None and not value > above:
            raise argparse.ArgumentTypeError(f"{_short(text)} must be greater than {above:g}")
        return _within(value, allowed, text)

    return parse


def whole_numbers(allowed: Range, example: str) -> Callable[[str], tuple[int, ...]]:
    """Make a kind for lists of whole numbers with commas between them."""
    one = whole(allowed)

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(one(part) for part in text.split(","))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; give a list such as {example}") from None

    return parse


def _within(value: float, allowed: Range, text: str) -> float:
    if problem := allowed.problem(value):
        raise argparse.ArgumentTypeError(f"{_short(text)} {problem}")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
