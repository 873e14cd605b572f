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
        scale: one of the study's.
        seeds: runs of each model; None: the scale's.
        models: mixers in place of the scale's.
        rows, columns: of the report, by their names; none: all.
        more: further options of the study's own, such as `data`.
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
        kind: positive, whose value is to be at least the bound; negative, at most.
        what: in a few words; means: what it means that the control failed.
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
    """A study.

    Attributes:
        name, title: of its files, and for people.
        places: all places of what is asked, controls too; raises UserError.
        values: what was measured of a run, by its place on the axis; `value` is compared.
        source: the figure or table of the paper; claim: what the paper says that it shows.
        notes: what to know when it is read.
        measures: row (or its beginning) -> what `value` is; "" stands for all rows.
        also: further measure -> the title of its table.
        axis: what stands on the axis; figure: `curves`, `strips` of a colour a column, or
            `losses`, strips at the trained length of `extra` above curves.
        contrasts: of lines; by_row: whether intervals are corrected for those of a row alone.
        controls: of runs; extra: what else a record holds of runs.
        tables, pictures: further ones of a record, the latter by the end of their files' names.
        check: looks at finished cells, before and after the runs; raises UserError.
        solved: the value from which a run counts as having found its task.
        options: of `StudyOptions` and of the command that the study takes; scales: that it has.
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
        UserError: one is no mixer, is the negative control or is given twice.
    """
    for mixer in models:
        make(mixer, "--models")
        if mixer == NEGATIVE:
            raise UserError(f"--models {mixer}: is in every figure, as its negative control")
        if models.count(mixer) > 1:
            raise UserError(f"--models {mixer}: is given twice")
    return tuple(models)


def choose(option: str, known: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the known names that an option gives; all where it gives none.

    Raises:
        UserError: a name that is not there.
    """
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r}: choose among {'; '.join(known)}")
    return [name for name in known if name in (names or known)]


def is_finite(value: float | None) -> bool:
    """Return True if a value is a finite number."""
    return value is not None and math.isfinite(value)
