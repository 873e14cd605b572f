"""Studies: a question, the runs that answer it, their comparisons, controls and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cat_lm.core.errors import UserError
from eval.lab.contrasts import Contrast, first_minus_others
from eval.lab.frame import Line, Record, Values
from eval.lab.places import NEGATIVE, Place, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Rows = Sequence[tuple[Run, Record]]


@dataclass(frozen=True)
class StudyOptions:
    """The options that a command passes to a study.

    Attributes:
        scale: name of a scale of the study.
        seeds: number of runs of each model; None for the scale's.
        models: mixers to use instead of the scale's.
        rows, columns: names of rows and columns of the report; empty for all.
        more: options that only this study has, such as `data`.
    """

    scale: str
    seeds: int | None = None
    models: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """A check that a model learned its task, or that a model without information did not.

    Attributes:
        kind: `positive` (the value must be at least the bound) or `negative` (at most).
        what: short description of the control.
        means: what a failure of the control means.
    """

    row: str
    kind: str
    what: str
    line: str
    value: float
    bound: float
    means: str = ""

    @property
    def passed(self) -> bool:
        """Return True if the control has the expected result."""
        return self.value >= self.bound if self.kind == "positive" else self.value <= self.bound


def _no_list(_: Any) -> list[Any]:
    return []


def _no_values(_: Any) -> dict[str, Any]:
    return {}


class Table(NamedTuple):
    """An additional table of a report: heading, header and rows."""

    title: str
    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Study:
    """A study: the runs, measures and report for a claim of the paper.

    Attributes:
        name: name of the study's files.
        title: title of the report.
        places: returns all places for the given options, with the controls; may raise UserError.
        values: returns the measured values of a run by place on the axis; `value` is compared.
        source: figure or table of the paper.
        claim: what this figure or table shows according to the paper.
        notes: remarks for readers of the report.
        measures: row (or a prefix of it) -> meaning of `value`; "" stands for all rows.
        also: name of a further measure -> title of its table.
        axis: name of the axis.
        figure: `curves`, `strips` with a colour for each column, or `losses`: strips of `extra` at
            the trained length above curves.
        contrasts: returns the comparisons between lines.
        by_row: whether intervals are corrected for the comparisons of their row only.
        controls: returns the controls of finished runs.
        extra: returns further values of finished runs for the record.
        tables: returns further tables of a record.
        pictures: returns further figures of a record by the suffixes of their files' names.
        check: checks finished cells before and after the runs; may raise UserError.
        solved: value from which a run counts as having solved its task.
        options: names of the options that the study accepts.
        scales: names of the scales that it has.
    """

    name: str
    title: str
    places: Callable[[StudyOptions], list[Place]]
    values: Values
    source: str = ""
    claim: str = ""
    notes: str = ""
    measures: Mapping[str, str] = field(default_factory=lambda: {"": "accuracy"})
    also: Mapping[str, str] = field(default_factory=dict)
    axis: str = "length"
    figure: str = "curves"
    contrasts: Callable[[Sequence[Line]], Sequence[Contrast]] = first_minus_others
    by_row: bool = False
    controls: Callable[[Rows], list[Control]] = _no_list
    extra: Callable[[Rows], dict[str, Any]] = _no_values
    tables: Callable[[Record], list[Table]] = _no_list
    pictures: Callable[[Record], Mapping[str, Figure]] = _no_values
    check: Callable[[Sequence[Any], Path], None] | None = None
    solved: float | None = None
    options: tuple[str, ...] = ("models", "rows")
    scales: tuple[str, ...] = ("smoke", "cpu", "paper")

    def measure_of(self, row: str) -> str:
        """Return the name of `value` in a row."""
        keys = [key for key in self.measures if row.startswith(key)]
        return self.measures[max(keys, key=len)]


def check_models(models: Sequence[str], make: Callable[[str, str], object]) -> tuple[str, ...]:
    """Return the mixers that --models names.

    Args:
        make: makes a mixer of a specification and the option's name, or raises UserError.

    Raises:
        UserError: a name is no mixer, is the negative control, or is given twice.
    """
    for mixer in models:
        make(mixer, "--models")
        if mixer == NEGATIVE:
            raise UserError(f"--models {mixer}: is in every figure, as its negative control")
        if models.count(mixer) > 1:
            raise UserError(f"--models {mixer}: is given twice")
    return tuple(models)


def choose(option: str, known: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the known names that an option gives; all names if it gives none.

    Raises:
        UserError: a name is unknown.
    """
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r}: choose among {'; '.join(known)}")
    return [name for name in known if name in (names or known)]


def is_finite(value: float | None) -> bool:
    """Return True if a value is a finite number."""
    return value is not None and math.isfinite(value)
