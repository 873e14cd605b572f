"""Options of commands, declared once: by the annotated fields of the dataclass that is recorded.

    @dataclass(frozen=True)
    class Cell:
        d_model: Annotated[int, Option("model width", numbers.SMALL_WIDTH)]

A field's type decides how its text is read, its default is the option's, and `check_options` holds
instances made in Python against the same ranges.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from cat_lm.core import cli
from cat_lm.core.errors import UserError
from cat_lm.core.numbers import Range, check_number

T = TypeVar("T")
_SILENT = ("None", "False", "()", argparse.SUPPRESS)  # defaults that the help does not show


class Option(NamedTuple):
    """The properties of an option in addition to its field's name, type and default.

    Attributes:
        range, above: the allowed range of a number, or of each in a list; `above` itself is not
            allowed.
        word: stands for None.
        example: an example of a list.
        kind: reads the text, in the place of what the field's type says.
    """

    help: str = ""
    range: Range | None = None
    above: float | None = None
    word: str | None = None
    metavar: str | None = None
    example: str = "1,2"
    kind: Callable[[str], Any] | None = None


def add_options(
    parser: argparse.ArgumentParser,
    cls: type,
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add the options of a dataclass: fields that are annotated with an `Option`.

    Args:
        without: fields that are no options of this command.
        defaults: those that differ from the class's.
    """
    for field, kind, option in _options(cls):
        if field.name in without:
            continue
        default = {field.name: field.default, **(defaults or {})}[field.name]
        required = default is dataclasses.MISSING
        how: dict[str, Any] = _reader(kind, option, default)
        how |= {"required": True} if required else {"default": default}
        said = option.help
        if not required and str(default) not in _SILENT:
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            said += f" (default: {shown})"
        how["help"] = said.strip()
        parser.add_argument(f"--{field.name.replace('_', '-')}", **how)


def options_of(arguments: argparse.Namespace, cls: type[T]) -> T:
    """Build an instance from parsed arguments; fields without an option keep their defaults."""
    values = vars(arguments)
    names = [field.name for field in dataclasses.fields(cls) if field.name in values]
    return cls(**{name: values[name] for name in names})


def check_options(instance: Any) -> None:
    """Check the values of an instance's options. Raises UserError for one that is not allowed."""
    for field, kind, option in _options(type(instance)):
        value = getattr(instance, field.name)
        if value is None or kind is bool:
            continue
        if typing.get_origin(kind) is typing.Literal:
            if value not in (choices := typing.get_args(kind)):
                raise UserError(f"{field.name}={value}: must be {' or '.join(choices)}")
        elif option.range is not None:
            for each in value if isinstance(value, tuple) else (value,):
                try:
                    check_number(each, option.range, above=option.above)
                except ValueError as error:
                    raise UserError(f"{field.name}={each}: {error}") from None


def _options(cls: type) -> Iterator[tuple[dataclasses.Field, Any, Option]]:
    """Yield each option's field, type without None, and declaration."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, Option):
                kind = typing.get_args(hint)[0]
                if type(None) in typing.get_args(kind):
                    (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
                yield field, kind, option


def _reader(kind: Any, option: Option, default: Any) -> dict[str, Any]:
    """Return how argparse reads an option of a type."""
    if kind is bool:
        is_switch = default is False
        return {"action": "store_true" if is_switch else argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    read = option.kind
    if kind is int:
        read = cli.whole(option.range)
    elif kind is float:
        read = cli.number(option.range, above=option.above)
    elif typing.get_origin(kind) is tuple and read is None:
        read = cli.whole_numbers(option.range, option.example)
    if option.word is not None:
        read = cli.or_word(read, option.word)
    return {"type": read} | ({"metavar": option.metavar} if option.metavar else {})
