"""The pydantic types of configuration keys: numbers of a range, paths, names, and sections of them.

The ranges are those of `cat_lm.core.numbers`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from cat_lm.core import folders, numbers
from cat_lm.core.numbers import Range
from cat_lm.core.registry import Registry


def whole(allowed: Range) -> BeforeValidator:
    """Return the validator of a whole number of a range: 20000, 0.5M, 15B."""
    return BeforeValidator(lambda value: numbers.check_whole(value, allowed))


def number(
    allowed: Range, *, above: float | None = None, below: float | None = None
) -> BeforeValidator:
    """Return the validator of a number of a range, greater than `above` and less than `below`."""
    return BeforeValidator(
        lambda value: numbers.check_number(value, allowed, above=above, below=below)
    )


def entry_of(registry: Registry) -> AfterValidator:
    """Return the validator of a name that a registry has."""

    def check(name: str) -> str:
        if problem := registry.problem(name):
            raise ValueError(problem)
        return name

    return AfterValidator(check)


def _check_path(path: str | None) -> str | None:
    if path is not None and (problem := folders.path_problem(path)):
        raise ValueError(problem)
    return path


def _check_output(path: str | None) -> str | None:
    if path is not None and (problem := folders.output_problem(path)):
        raise ValueError(problem)
    return path


def check_name(name: str | None) -> str | None:
    if name is not None and not (name.strip() and name.isprintable() and len(name) <= 128):
        raise ValueError("must be a name of up to 128 printable characters")
    return name


PathText = Annotated[str, AfterValidator(_check_path)]
OptionalPath = Annotated[str | None, AfterValidator(_check_path)]
OutputPath = Annotated[str, AfterValidator(_check_output)]
OptionalOutput = Annotated[str | None, AfterValidator(_check_output)]


class Section(BaseModel):
    """A section of a YAML file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
