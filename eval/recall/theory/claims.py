"""A claim beside its measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One row of the theory page.

    Attributes:
        source: where it stands, such as `Theorem 1`.
        statement: what is claimed.
        setting: what was computed.
        measured: the number or numbers, with units.
        holds: whether the measurement agrees with the statement as it is given here.
        correction: what had to be read differently from the paper's words, and why; may be empty.
    """

    source: str
    statement: str
    setting: str
    measured: str
    holds: bool
    correction: str = ""

    def text(self) -> str:
        """The claim as lines for a terminal."""
        lines = [
            f"{self.source}: {self.statement}",
            f"  computed: {self.setting}",
            f"  measured: {self.measured}",
            f"  {'holds' if self.holds else 'DOES NOT HOLD'}",
        ]
        if self.correction:
            lines.append(f"  correction: {self.correction}")
        return "\n".join(lines)
