"""The parser of all commands, and argument types for it; bad values are one line and exit code 2.

An argument type is a function for argparse's `type=`. The ranges are those of
`cat_lm.core.numbers`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cat_lm.core.errors import UserError, launched_rank
from cat_lm.core.folders import check_file, output_problem, path_problem
from cat_lm.core.numbers import LEARNING_RATE, Range, check_number, check_whole
from cat_lm.core.readers import clipped

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s, one line each; argparse prints the usage and ends."""

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:
            # The missing option may be there, misspelt.
            self._refuse_misspelt(self._words)
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raise for an option that is nearly one of this parser's, or of its subcommand's."""
        self._words = sys.argv[1:] if args is None else list(args)
        namespace, rest = super().parse_known_args(args, namespace)
        self._refuse_misspelt(rest)
        return namespace, rest

    def _refuse_misspelt(self, words: list[str]) -> None:
        known = [name.removeprefix("--") for name in self._option_string_actions]
        for text in words[: words.index("--") if "--" in words else None]:
            name = text.partition("=")[0].removeprefix("--")[:60]
            is_known = any(option.startswith(name) for option in known)
            near = difflib.get_close_matches(name, known, 1) if text.startswith("--") else []
            if near and not is_known:
                self.error(f"unrecognized arguments: {clipped(text)}; did you mean --{near[0]}?")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # A shell's unset variable gives an empty value, which as a path would be the working
        # directory. Options with a type and subcommands check their own values.
        if not arg_string and action.type is None and action.nargs != argparse.PARSER:
            raise argparse.ArgumentError(action, "'' is no path, name or value")
        return super()._get_value(action, arg_string)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Before Python 3.12 argparse makes [] of the value in --option=--.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)


def announce(line: str) -> None:
    """Print on stderr what a command does, before it imports the libraries that take seconds.

    Of several ranks, only the first prints. Nothing is printed where torch is imported already:
    there the command is called by another program, and does not seem to hang.
    """
    if launched_rank() == "0" and "torch" not in sys.modules:
        print(line, file=sys.stderr, flush=True)


class Once(argparse.Action):
    """Store an option's value; raise for a second one, which would silently replace the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "is given twice")
        setattr(namespace, self.dest, values)


def whole(allowed: Range) -> Callable[[str], int]:
    """Return the argument type of whole numbers within a range: 20, 1_000, 15B."""
    return argument_type(lambda text: check_whole(text, allowed))


def number(allowed: Range, *, above: float | None = None) -> Callable[[str], float]:
    """Return the argument type of numbers within a range, and above `above` if it is given."""
    return argument_type(lambda text: check_number(text, allowed, above=above))


def argument_type(check: Callable[[str], T]) -> Callable[[str], T]:
    """Return the argument type of a function whose ValueError says what would be right."""

    def parse(text: str) -> T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{clipped(text)!r} {error}") from None

    return parse


def whole_numbers(
    allowed: Range, example: str, *, distinct: bool = False
) -> Callable[[str], tuple[int, ...]]:
    """Return the argument type of comma-separated whole numbers; `distinct` allows none twice."""
    return comma_separated(whole(allowed), example, distinct=distinct)


def comma_separated(
    one: Callable[[str], Any], example: str, *, distinct: bool = False
) -> Callable[[str], tuple[Any, ...]]:
    """Return the argument type of comma-separated `one` values; `distinct`: none twice."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            found = tuple(one(part) for part in text.split(","))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; give a list such as {example}") from None
        if distinct and len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{clipped(text)!r} names a number twice")
        return found

    return parse


def or_word(one: Callable[[str], Any], word: str) -> Callable[[str], Any]:
    """Return the argument type of values of the type `one`, or of `word`, which becomes None."""

    def parse(text: str) -> Any:
        try:
            return None if text == word else one(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {word}") from None

    return parse


def learning_rates(text: str) -> tuple[float, ...]:
    """Parse comma-separated learning rates, each given once, and sort them."""
    one = number(LEARNING_RATE, above=0)
    return tuple(sorted(comma_separated(one, "1e-3,3e-3,1e-2", distinct=True)(text)))


def path_name(text: str) -> str:
    """Parse a path, or a name that may be one, and return it as it was typed."""
    return _accepted(text, path_problem)


def path(text: str) -> Path:
    """Parse a path; an empty text, which would be the current folder, is refused."""
    return Path(path_name(text))


def output_path(text: str) -> Path:
    """Parse the path of a folder or file of this machine that can be written to."""
    return Path(_accepted(text, output_problem))


def _accepted(text: str, problem_of: Callable[[str], str | None]) -> str:
    if problem := problem_of(text):
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} {problem}")
    return text


def output_file(text: str) -> Path:
    """Parse the path of a file, and check that it can be written when the work is done."""
    try:
        check_file(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def add_skip_checksums(parser: argparse.ArgumentParser) -> None:
    """Add `--skip-checksums`, which every command that loads a model has."""
    parser.add_argument(
        "--skip-checksums",
        action="store_true",
        help="load the model without comparing its files with the checksums of its export",
    )
