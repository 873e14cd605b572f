"""A Hypothesis strategy of command lines with one odd word, by the options of their parsers."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import strategies as st

from tests.fuzz.targets import Target

_WORDS = ("", " ", "-", "--", "0", "-1", "1", "1e30", str(10**30), str(-(10**19)), "0.5", "nan")
_WORDS += ("inf", "-inf", "1e-320", "1e300", "true", "null", "[]", "{}", "a" * 300, "../../x")
_WORDS += ("/proc/x", "/dev/full", "\x01\x1b[31m\u200b\U0001f600", "2020-99-99", "!!timestamp abc")
ODD_WORDS = st.sampled_from(_WORDS) | st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp", "Nd")), max_size=12
)


class OddLine(NamedTuple):
    """Words of a command line, and the value that makes it odd."""

    words: tuple[str, ...]
    value: str


def options_of(parser: argparse.ArgumentParser, line: Sequence[str]) -> dict[str, bool]:
    """Return the options of a parser and of the subcommand in `line`: whether it takes a value.

    Subcommands stand there, too, as taking none. Help, and what help does not show, is left out.
    """
    found: dict[str, bool] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= dict.fromkeys(action.choices, False)
            for word in set(line) & action.choices.keys():
                found |= options_of(action.choices[word], line)
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            found[max(action.option_strings, key=len)] = action.nargs != 0
    return found


@st.composite
def odd_lines(
    draw: st.DrawFn, line: Sequence[str], options: Mapping[str, bool], keys: Sequence[str]
) -> OddLine:
    """Draw a line with one odd word: in the place of one, as an option's value, or as a key's.

    Args:
        line: a command line that is accepted.
        options: of the command, and its subcommands; True for those that take a value.
        keys: keys of a configuration that may be given as KEY=VALUE.
    """
    value = draw(ODD_WORDS)
    given = [i for i, word in enumerate(line) if not word.startswith("--") and word not in options]
    absent = [name for name in options if name.startswith("--") and name not in line]
    groups = [group for group in (given, absent, list(keys)) if group]
    chosen = draw(st.sampled_from(draw(st.sampled_from(groups))))
    if isinstance(chosen, int):
        return OddLine(_replaced(line, chosen, value, options, draw), value)
    if not chosen.startswith("--"):
        return OddLine((*line, f"{chosen}={value}"), value)
    # What follows `--` belongs to another program.
    end = line.index("--") if "--" in line else len(line)
    word = f"{chosen}={value}" if options[chosen] else chosen
    return OddLine((*line[:end], word, *line[end:]), value if options[chosen] else "")


def _replaced(
    line: Sequence[str], index: int, value: str, options: Mapping[str, bool], draw: st.DrawFn
) -> tuple[str, ...]:
    """Return `line` with `value` in the word at `index`; an override keeps its key."""
    name, equals, setting = line[index].rpartition("=")
    if "," in setting and draw(st.booleans()):
        parts = setting.split(",")
        parts[draw(st.integers(0, len(parts) - 1))] = value
        value = ",".join(parts)
    word = f"{name}{equals}{value}"
    before = line[index - 1] if index else ""
    if options.get(before):
        return (*line[: index - 1], f"{before}={word}", *line[index + 1 :])
    return (*line[:index], word, *line[index + 1 :])


class _Captured(BaseException):
    """Carries a parser out of a command, past its handlers of errors."""


@functools.cache
def described(target: Target) -> dict[str, bool]:
    """Return `options_of` the parser that a target's command makes."""
    module = importlib.import_module(target.module)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{target.module}.__main__")

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(parser)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        mock.patch.object(sys, "argv", [target.module, *target.line]),
        pytest.raises(_Captured) as captured,
    ):
        module.main()
    return options_of(captured.value.args[0], target.line)


@functools.cache
def config_keys() -> tuple[str, ...]:
    """Return every key of a run's configuration, as in an override."""
    from cat_lm import architectures
    from cat_lm.config import known_keys

    sections = [known_keys({"model": {"architecture": name}}) for name in architectures.names()]
    keys = (f"{name}.{key}" for each in sections for name, keys in each.items() for key in keys)
    return tuple(dict.fromkeys(keys))
