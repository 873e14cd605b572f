"""Options of what is chosen by name: `cat:streams=k,init=identity`, or a section's, as a dataclass.

A class of options is a frozen dataclass whose fields have plain types; its `__post_init__` raises
ValueError for values that do not fit together.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from cat_lm.core import numbers
from cat_lm.core.errors import UserError
from cat_lm.core.readers import clipped

T = TypeVar("T")
_NUMBERS = (
    (int, numbers.check_whole, numbers.OPTION),
    (float, numbers.check_number, numbers.OPTION_NUMBER),
)


def parse_specification(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value,key=value` into (name, {key: value}).

    Raises:
        UserError: something after the colon is not key=value, or the same could be written shorter:
            with spaces, or a colon that nothing follows. A specification names what was computed.
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
    """Make an instance of `cls` from defaults and from text or values.

    Args:
        cls: a dataclass.
        what: names it in messages.
        given: option -> value, or its text.
        defaults: option -> value, over those of the class.
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
    """Return the options that differ from the class's defaults."""
    return {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.init and getattr(options, f.name) != f.default
    }


def _value(where: str, given: Any, kind: Any) -> Any:
    """Read a value as one of the types of a union, tried from the narrowest.

    The option, not the value, decides what text means, so that files and command lines agree.
    """
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
