"""Types of configuration keys and of options, and how both are read.

Keys have pydantic types: numbers of a range, paths, names. The options of a class that is chosen by
name, as in `cat:streams=k,init=identity`, are the fields of a frozen dataclass of plain types,
whose `__post_init__` raises ValueError for values that do not fit together. The ranges are those of
`cat_lm.core.numbers`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from cat_lm.core.errors import UserError
from cat_lm.core.folders import output_problem, path_problem
from cat_lm.core.numbers import OPTION, OPTION_NUMBER, Range, check_number, check_whole
from cat_lm.core.readers import clipped
from cat_lm.core.registry import Registry

T = TypeVar("T")
_NUMBERS = (
    (int, check_whole, OPTION),
    (float, check_number, OPTION_NUMBER),
)


def whole(allowed: Range) -> BeforeValidator:
    """Return the validator of a whole number of a range: 20000, 0.5M, 15B."""
    return BeforeValidator(lambda value: check_whole(value, allowed))


def whole_or(word: str, allowed: Range) -> BeforeValidator:
    """Return the validator of a whole number of a range, or a word."""
    return BeforeValidator(lambda value: value if value == word else check_whole(value, allowed))


def number(
    allowed: Range, *, above: float | None = None, below: float | None = None
) -> BeforeValidator:
    """Return the validator of a number of a range, greater than `above` and less than `below`."""
    return BeforeValidator(lambda value: check_number(value, allowed, above=above, below=below))


def entry_of(registry: Registry) -> AfterValidator:
    """Return the validator of the name of a registered class."""
    return _without(registry.problem)


def _without(problem_of: Callable[[Any], str | None], optional: bool = False) -> AfterValidator:
    def check(value: Any) -> Any:
        problem = None if optional and value is None else problem_of(value)
        if problem:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _name_problem(name: str) -> str | None:
    is_name = name.strip() and name.isprintable() and len(name) <= 128
    return None if is_name else "must be a name of up to 128 printable characters"


def _word_problem(name: str) -> str | None:
    is_word = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name)
    return None if is_word else "must be a name of letters, digits, ., - and _"


PathText = Annotated[str, _without(path_problem)]
OptionalPath = Annotated[str | None, _without(path_problem, optional=True)]
OutputPath = Annotated[str, _without(output_problem)]
OptionalOutput = Annotated[str | None, _without(output_problem, optional=True)]
Name = Annotated[str, _without(_name_problem)]
OptionalName = Annotated[str | None, _without(_name_problem, optional=True)]
Word = Annotated[str, _without(_word_problem)]


class Section(BaseModel):
    """A section of a YAML file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of an entry that has none."""


def parse_specification(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value,key=value` into the pair (name, {key: value}).

    Raises UserError where a part after the colon is not key=value, and for spaces or nothing after
    the colon: stored results are named by a specification, which therefore has one spelling.
    """
    if text.endswith(":") or any(character.isspace() for character in text):
        raise UserError(f"{text!r}: must be name or name:key=value,key=value, without spaces")
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r}: {part!r} must be key=value")
        if key in options:
            raise UserError(f"{text!r}: {key} is given twice")
        options[key] = value
    return name, options


def build_options(
    cls: type[T],
    what: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    fixed: tuple[str, ...] = (),
) -> T:
    """Return an instance of the dataclass `cls` from defaults and given values.

    Args:
        what: names the instance in messages.
        given: option -> value, or the value's text.
        defaults: option -> value, instead of the defaults of the class.
        fixed: options of `defaults` that `given` may not change.

    Raises:
        UserError: an unknown option, a value of the wrong type, or values that do not fit.
    """
    kinds = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in fixed]
    values = dict(defaults or {})
    for key, value in given.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            known = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
            raise UserError(f"{what}: unknown option {key!r}; {known}")
        values[key] = _value(f"{what}: {key}", value, kinds[key])
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{what}: {error}") from None


def changed_options(options: Any) -> dict[str, Any]:
    """Return the options, by name, that differ from the defaults of their class."""
    return {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.init and getattr(options, f.name) != f.default
    }


def _value(where: str, given: Any, kind: Any) -> Any:
    """Return a value as the first type of a union that fits: None, bool, int, float, then str."""
    kinds = typing.get_args(kind) or (kind,)
    if isinstance(given, bool):
        given = str(given).lower()
    text = "none" if given is None else str(given)
    if isinstance(given, list | Mapping):
        raise UserError(f"{where}={clipped(text)}: must be one value, not a list or a table")
    if type(None) in kinds and text == "none":
        return None
    if bool in kinds:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"{where}={text!r}: must be true or false")
    for kind, check, allowed in _NUMBERS:
        if kind in kinds:
            try:
                return check(text, allowed)
            except ValueError as error:
                problem = str(error)
    if str in kinds:
        return text
    raise UserError(f"{where}={clipped(text)}: {problem}")
