"""Kinds of values of the command's options."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cat_lm.core import numbers
from cat_lm.core.cli import whole_numbers
from cat_lm.core.readers import clipped

# Names that an error line has room for.
_NAMED = 10


def shape(text: str) -> tuple[int, ...]:
    """Four numbers: B,T,H,D."""
    found = whole_numbers(numbers.CONTEXT, "4,1024,8,64")(text)
    if len(found) != 4:
        raise argparse.ArgumentTypeError(
            f"{clipped(text)!r} must be four numbers B,T,H,D: 4,1024,8,64"
        )
    return found


def names(known: tuple[str, ...], every: str | None = None) -> Callable[[str], tuple[str, ...]]:
    """A list of known names: conv1d,fla."""

    def parse(text: str) -> tuple[str, ...]:
        if text == every:
            return known
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{clipped(name)!r} is not one of {first}")
        return found

    first = ", ".join(known[:_NAMED])
    if len(known) > _NAMED:
        first += f", … (--help has all {len(known)})"
    return parse
