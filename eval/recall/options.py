"""Options of tasks and mixers: text such as `cat:streams=k,init=identity` into a dataclass.

A class of options is a frozen dataclass whose fields have plain types; its `__post_init__` raises
ValueError for values that do not fit together.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from cat_lm import limits
from cat_lm.errors import UserError
from cat_lm.io.readers import clipped

T = TypeVar("T")


def parse_specification(text: str) -> tuple[str, dict[str, str]]:
    """`name:key=value,key=value` as (name, {key: value}).

    Raises:
        UserError: something after the colon is not key=value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise UserError(f"{text!r}: {part!r} must be key=value")
        if key.strip() in options:
            raise UserError(f"{text!r}: {key.strip()} is given twice")
        options[key.strip()] = value.strip()
    return name.strip(), options


def build_options(
    cls: type[T],
    what: str,
    given: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
    fixed: tuple[str, ...] = (),
) -> T:
    """An instance of `cls` from defaults and from text.

    Args:
        cls: a dataclass.
        what: names it in messages.
        given: option -> text.
        defaults: option -> value, over those of the class.
        fixed: options of `defaults` that `given` may not change.

    Raises:
        UserError: an unknown option, text of the wrong type, or values that do not fit.
    """
    kinds = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in fixed]
    values = dict(defaults or {})
    for key, text in given.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            known = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
            raise UserError(f"{what}: unknown option {key!r}; {known}")
        values[key] = _value(f"{what}: {key}", text, kinds[key])
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{what}: {error}") from None


def changed_options(options: Any) -> dict[str, Any]:
    """The options that differ from the class's defaults."""
    return {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.init and getattr(options, f.name) != f.default
    }


def _value(where: str, text: str, kind: Any) -> Any:
    """Text as one of the types of a union, tried from the narrowest."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in kinds and text == "none":
        return None
    if bool in kinds:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"{where}={text!r}: must be true or false")
    for number in (int, float):
        if number in kinds:
            try:
                value = number(text)
            except ValueError:
                continue
            if number is int and (problem := limits.OPTION.problem(value)):
                raise UserError(f"{where}={clipped(text)}: {problem}")
            return value
    if str in kinds:
        return text
    expected = " or ".join({int: "a whole number", float: "a number"}.get(k, "none") for k in kinds)
    raise UserError(f"{where}={text!r}: must be {expected}")
