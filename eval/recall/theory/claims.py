"""A claim beside its measurement, and beside something wrong that its check refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Verdict:
    """What a check found: the number or numbers, with units, and whether they pass."""

    measured: str
    passes: bool


@dataclass(frozen=True)
class Control:
    """A wrong model, construction or law, put to its claim's own check, which must refuse it."""

    what: str
    measured: str
    fails: bool


@dataclass(frozen=True)
class Claim:
    """One row of the theory page.

    Attributes:
        source: where it stands, such as `Theorem 1`.
        statement: what is claimed, as it is checked.
        setting: what was computed.
        measured: the number or numbers, with units.
        holds: whether the measurement agrees with the statement.
        controls: at least one.
        correction: what had to be read differently from the paper's words, and why; may be empty.
    """

    source: str
    statement: str
    setting: str
    measured: str
    holds: bool
    controls: tuple[Control, ...]
    correction: str = ""

    def __post_init__(self) -> None:
        if not self.controls:
            raise ValueError(f"{self.source}: a claim needs a negative control")

    @classmethod
    def judged(
        cls,
        source: str,
        statement: str,
        setting: str,
        check: Callable[[Subject], Verdict],
        right: Subject,
        wrong: Mapping[str, Subject],
        correction: str = "",
    ) -> Claim:
        """Puts what is right, and all that is wrong, to one check."""
        found = check(right)
        refused = {what: check(subject) for what, subject in wrong.items()}
        controls = (Control(what, v.measured, not v.passes) for what, v in refused.items())
        return cls(
            source, statement, setting, found.measured, found.passes, tuple(controls), correction
        )

    @property
    def stands(self) -> bool:
        """Return True if the claim holds and its check refuses every control."""
        return self.holds and all(control.fails for control in self.controls)

    def text(self) -> str:
        """The claim as lines for a terminal."""
        lines = [
            f"{self.source}: {self.statement}",
            f"  computed: {self.setting}",
            f"  measured: {self.measured}",
            f"  claim holds: {'yes' if self.holds else 'NO'}",
        ]
        lines += [
            f"  control fails: {'yes' if control.fails else 'NO'} ({control.what}: "
            f"{control.measured})"
            for control in self.controls
        ]
        if self.correction:
            lines.append(f"  correction: {self.correction}")
        return "\n".join(lines)
