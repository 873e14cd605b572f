"""The pydantic types of configuration keys: numbers of a range, paths, names, and sections of them.

The ranges are those of `cat_lm.core.numbers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from cat_lm.core.folders import output_problem, path_problem
from cat_lm.core.numbers import Range, check_number, check_whole
from cat_lm.core.registry import Registry


def whole(allowed: Range) -> BeforeValidator:
    """Return the validator of a whole number of a range: 20000, 0.5M, 15B."""
    return BeforeValidator(lambda value: check_whole(value, allowed))


def number(
    allowed: Range, *, above: float | None = None, below: float | None = None
) -> BeforeValidator:
    """Return the validator of a number of a range, greater than `above` and less than `below`."""
    return BeforeValidator(lambda value: check_number(value, allowed, above=above, below=below))


def entry_of(registry: Registry) -> AfterValidator:
    """Return the validator of a name that a registry has."""
    return _without(registry.problem)


def _without(problem_of: Callable[[Any], str | None], optional: bool = False) -> AfterValidator:
    """Return the validator of a value that has no problem, or is None where it is optional."""

    def check(value: Any) -> Any:
        problem = None if optional and value is None else problem_of(value)
        if problem:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _name_problem(name: str) -> str | None:
    is_name = name.strip() and name.isprintable() and len(name) <= 128
    return None if is_name else "must be a name of up to 128 printable characters"


PathText = Annotated[str, _without(path_problem)]
OptionalPath = Annotated[str | None, _without(path_problem, optional=True)]
OutputPath = Annotated[str, _without(output_problem)]
OptionalOutput = Annotated[str | None, _without(output_problem, optional=True)]
OptionalName = Annotated[str | None, _without(_name_problem, optional=True)]


class Section(BaseModel):
    """A section of a YAML file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
