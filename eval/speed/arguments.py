"""Kinds of values of the command's options."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Several of them: 3,4,8."""
    return tuple(positive(part.strip()) for part in text.split(","))


def shape(text: str) -> tuple[int, ...]:
    """Four of them: B,T,H,D."""
    found = numbers(text)
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} must be four numbers B,T,H,D: 4,1024,8,64")
    return found


def names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A list of known names: conv1d,fla."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return found

    return parse
