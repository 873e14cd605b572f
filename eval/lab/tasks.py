"""Tasks by name: frozen options that generate or read rows, with presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cat_lm.core.fields import build_options


@dataclass(frozen=True)
class Task:
    """The base of all tasks: a frozen dataclass of options, plain values that decide its rows."""

    @property
    def vocabulary(self) -> int:
        """Return the exclusive upper bound of token ids; 0 for real-valued inputs."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return all values that decide the rows."""
        return asdict(self)


@dataclass(frozen=True)
class NamedTask:
    """A task under a name.

    Attributes:
        fixed: options that nobody may change under this name.
        defaults: options that differ from the class's own.
    """

    name: str
    options: type[Task]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def make(self, given: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> Task:
        """Make the task of options, as values or text. Raises UserError for those that do not fit.

        Args:
            fixed: further options that `given` may not change.
        """
        fixed = {**self.fixed, **(fixed or {})}
        defaults = {**self.defaults, **fixed}
        return build_options(self.options, f"task {self.name}", given, defaults, tuple(fixed))
