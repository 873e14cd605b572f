"""Claims: what is measured of each, and of something wrong that its check refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from cat_lm.core import numbers
from eval.common.options import Option


@dataclass(frozen=True)
class Simulations:
    """The numbers of random draws."""

    seed: Annotated[int, Option(range=numbers.SEED)] = 0
    rows: Annotated[int, Option("sequences for each construction", numbers.TRIALS)] = 500
    trials: Annotated[int, Option("trials of the slower simulations", numbers.TRIALS)] = 400


class Verdict(NamedTuple):
    """The result of a check: numbers with units, and whether they pass."""

    measured: str
    passes: bool


@dataclass(frozen=True)
class Claim:
    """A row of the theory's page.

    Attributes:
        source: place in the paper, such as `Theorem 1`.
        statement: what is claimed, as it is checked.
        setting: description of the computation.
        check: judges a model, a construction or a law.
        right: the one that the claim speaks of.
        wrong: by their names, those that the check must refuse; at least one.
        correction: what had to be read differently from the paper's words, and why; may be empty.
    """

    source: str
    statement: str
    setting: str
    check: Callable[[Any], Verdict]
    right: Any
    wrong: Mapping[str, Any]
    correction: str = ""

    def judge(self) -> dict[str, Any]:
        """Return the results of the check for the right construction and for all wrong ones."""
        if not self.wrong:
            raise ValueError(f"{self.source}: a claim needs a negative control")
        measured, holds = self.check(self.right)
        refused = {what: self.check(subject) for what, subject in self.wrong.items()}
        return {
            "source": self.source,
            "statement": self.statement,
            "setting": self.setting,
            "measured": measured,
            "holds": holds,
            "controls": [
                {"what": what, "measured": found.measured, "fails": not found.passes}
                for what, found in refused.items()
            ],
            "correction": self.correction,
        }


def stands(found: Mapping[str, Any]) -> bool:
    """Return True if a judged claim holds and its check refused every control."""
    return found["holds"] and all(control["fails"] for control in found["controls"])


def describe(found: Mapping[str, Any]) -> str:
    """Describe a judged claim on a terminal."""
    words = {True: "yes", False: "NO"}
    lines = [
        f"{found['source']}: {found['statement']}",
        f"  computed: {found['setting']}",
        f"  measured: {found['measured']}",
        f"  claim holds: {words[found['holds']]}",
    ]
    lines += [
        f"  control fails: {words[control['fails']]} ({control['what']}: {control['measured']})"
        for control in found["controls"]
    ]
    return "\n".join(lines + [f"  correction: {found['correction']}"] * bool(found["correction"]))
