"""Tasks by name: a class of options, with what a name fixes and what it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cat_lm.core.fields import build_options


@dataclass(frozen=True)
class NamedTask:
    """A task under a name.

    Attributes:
        options: a frozen dataclass of plain values, which generates the task's examples.
        fixed: options that nobody may change under this name.
        defaults: options that differ from the class's own.
    """

    name: str
    options: type
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def make(self, given: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> Any:
        """Make the task of options, as values or text. Raises UserError for those that do not fit.

        Args:
            fixed: further options that `given` may not change.
        """
        fixed = {**self.fixed, **(fixed or {})}
        defaults = {**self.defaults, **fixed}
        return build_options(self.options, f"task {self.name}", given, defaults, tuple(fixed))
