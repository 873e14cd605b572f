"""Odd values, and command lines of which one value is odd."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

ODD = (
    "",
    " ",
    "-",
    "--",
    "0",
    "-1",
    "1",
    "1e30",
    str(10**30),
    str(-(10**19)),
    "0.5",
    "nan",
    "inf",
    "-inf",
    "1e-320",
    "1e300",
    "true",
    "null",
    "[]",
    "{}",
    "a" * 300,
    "../../x",
    "/proc/x",
    "/dev/full",
    "\x01\x1b[31m\u200b\U0001f600",
    "2020-99-99",
    "!!timestamp abc",
)


def options_of(parser: Any, line: Sequence[str]) -> dict[str, bool]:
    """The options of an argparse parser and of the subcommand in `line`: whether it takes a value.

    Help, and what help does not show, is left out.
    """
    import argparse

    found: dict[str, bool] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = next((word for word in line if word in action.choices), None)
            if chosen is not None:
                found |= options_of(action.choices[chosen], line)
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            found[max(action.option_strings, key=len)] = action.nargs != 0
    return found


def subcommands_of(parser: Any) -> set[str]:
    """The names of a parser's subcommands, which are no values."""
    import argparse

    kinds = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name for action in kinds for name in action.choices}


def odd_line(
    line: Sequence[str],
    options: dict[str, bool],
    words: set[str],
    keys: Sequence[str],
    rng: random.Random,
) -> tuple[list[str], str, str]:
    """`line` with one odd value: (the line, what is odd, the value).

    Args:
        line: a command line that is accepted.
        options: of the command; True for those that take a value.
        words: subcommands, left as they are.
        keys: keys of a configuration that may be given as KEY=VALUE.
    """
    value = rng.choice(ODD)
    given = [i for i, word in enumerate(line) if not word.startswith("--") and word not in words]
    absent = [name for name in options if name not in line]
    groups = [group for group in (given, absent, list(keys)) if group]
    group = rng.choice(groups)
    if group is given:
        index = rng.choice(given)
        before = line[index - 1] if index else ""
        option = before if before.startswith("--") and options.get(before, True) else None
        return _replaced(line, index, option, value, rng)
    name = rng.choice(group)
    if group is not absent:
        return [*line, f"{name}={value}"], name, value
    added = [f"{name}={value}"] if options[name] else [name]
    # What follows `--` belongs to another program.
    end = line.index("--") if "--" in line else len(line)
    return [*line[:end], *added, *line[end:]], name, value if options[name] else ""


def _replaced(
    line: Sequence[str], index: int, option: str | None, value: str, rng: random.Random
) -> tuple[list[str], str, str]:
    """`line` with `value` for the word at `index`, which is that of `option` if not positional."""
    old = line[index]
    name, equals, setting = old.partition("=")
    new = value
    if equals:  # an override keeps its key
        old, new = setting, f"{name}={value}"
    elif "," in old and rng.random() < 0.5:
        parts = old.split(",")
        parts[rng.randrange(len(parts))] = value
        new = ",".join(parts)
    what = name if equals else option or f"argument {index + 1}"
    if option not in (None, "--") and rng.random() < 0.7:
        return [*line[: index - 1], f"{option}={new}", *line[index + 1 :]], what, value
    return [*line[:index], new, *line[index + 1 :]], what, value
