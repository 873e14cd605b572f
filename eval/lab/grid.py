"""The grid of a study: places in its figure, whose learning rates are chosen on other seeds.

Every rate of a place is tried with TUNING_SEED, or with several seeds from it on. The best by the
cell's own score, mean over these, is taken: of validation rows, or of a language model of held-out
documents that are not reported. Of those that are as good it is the one nearest to the middle of
what was tried. Where the best lies on the grid's edge, one rate beyond is tried too, and if that is
the best it stays marked: a better one may be beyond. Then the reported seeds run, at this rate
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.lab.places import Place, Run

if TYPE_CHECKING:
    from eval.lab.cell import Cell
    from eval.lab.execution import Execution

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
_AS_GOOD = 0.005  # Scores (accuracies, nats, log2 of steps) that differ by no more count as equal.


@dataclass(frozen=True)
class Choice:
    """The chosen learning rate of a place.

    Attributes:
        tried: rate -> score with the tuning seed; empty where there was one rate.
        on_edge: whether it is the least or the largest of several that were tried.
    """

    rate: float
    tried: Mapping[float, float]
    on_edge: bool


def choose(tried: Mapping[float, float]) -> Choice:
    """Return the best learning rate by score; see above."""
    rates = sorted(tried)
    best = max(tried.values())
    middle = (math.log(rates[0]) + math.log(rates[-1])) / 2
    good = [rate for rate in rates if tried[rate] >= best - _AS_GOOD]
    rate = min(good, key=lambda rate: round(abs(math.log(rate) - middle), 6))
    return Choice(rate, tried, len(rates) > 1 and rate in (rates[0], rates[-1]))


def next_rate(choice: Choice) -> float | None:
    """Return the next rate of LADDER beyond the boundary that a choice lies on; None inside the
    grid.
    """
    if not choice.on_edge:
        return None
    if choice.rate == min(choice.tried):
        return max((rate for rate in LADDER if rate < choice.rate), default=None)
    return min((rate for rate in LADDER if rate > choice.rate), default=None)


def run_tuned(
    title: str, places: Sequence[Place], out: Path, execution: Execution
) -> list[tuple[Run, dict[str, Any], Choice]] | None:
    """Tune the learning rates of all places, then run them.

    Returns:
        The reported runs with their records and choices; none after an estimate alone.
    """
    from eval.lab.execution import run_unfinished

    trials, later = _planned(places, out)
    if not run_unfinished(title, trials, out, execution, later=later):
        return None
    wider = [run for place in places for run in _beyond(place, out)]
    run_unfinished(f"{title}, rates beyond an edge", wider, out, execution, estimated=True)
    choices = [_choice(place, out) for place in places]
    reported = [
        (run, choice)
        for place, choice in zip(places, choices, strict=True)
        for run in _reported(place, choice.rate)
    ]
    runs = [run for run, _ in reported]
    run_unfinished(f"{title}, at the chosen rates", runs, out, execution, estimated=True)
    return [(run, _finished(out, run.cell), choice) for run, choice in reported]


def planned_runs(places: Sequence[Place], out: Path) -> list[Run]:
    """Return all runs of places that are known before they begin."""
    trials, later = _planned(places, out)
    return [*trials, *later]


def all_records(places: Sequence[Place], out: Path) -> Iterator[dict[str, Any]]:
    """Read the records of all runs of finished places, those that chose rates among them."""
    return (_finished(out, run.cell) for run in planned_runs(places, out))


def _finished(out: Path, cell: Cell) -> dict[str, Any] | None:
    from eval.lab.cell import finished  # It needs torch, which reports do without.

    return finished(out, cell)


def _planned(places: Sequence[Place], out: Path) -> tuple[list[Run], list[Run]]:
    trials = [run for place in places for run in _trials(place)]
    return trials, [run for place in places for run in _final_runs(place, out)]


def _trials(place: Place) -> list[Run]:
    several = len(place.rates) > 1
    return [run for rate in place.rates for run in place.tried_at(rate)] if several else []


def _reported(place: Place, rate: float) -> list[Run]:
    return [place.at(rate, seed) for seed in range(place.seeds)]


def _tuning_scores(runs: Sequence[Run], out: Path) -> dict[float, float] | None:
    """Return the score of each rate; None unless all runs are finished."""
    scores: dict[float, list[float]] = {}
    for run in runs:
        if (record := _finished(out, run.cell)) is None:
            return None
        score = run.cell.score(record)
        # A diverged model gets the worst score.
        scores.setdefault(run.cell.lr, []).append(-math.inf if math.isnan(score) else score)
    return {rate: sum(of_rate) / len(of_rate) for rate, of_rate in scores.items()}


def _beyond(place: Place, out: Path) -> list[Run]:
    """Return the trials beyond the grid's boundary, if the best rate lies on it."""
    tried = _tuning_scores(_trials(place), out)
    rate = next_rate(choose(tried)) if tried else None
    return [] if rate is None else place.tried_at(rate)


def _choice(place: Place, out: Path) -> Choice | None:
    """Return a place's choice; None unless its trials are finished."""
    trials = _trials(place)
    if not trials:
        return Choice(place.rates[0], {}, False)
    tried = _tuning_scores([*trials, *_beyond(place, out)], out)
    return choose(tried) if tried else None


def _final_runs(place: Place, out: Path) -> list[Run]:
    """Return the runs after the trials; equally expensive ones while they are unknown."""
    choice = _choice(place, out)
    if choice is not None:
        return [*_beyond(place, out), *_reported(place, choice.rate)]
    wider = _beyond(place, out)
    if not wider and _tuning_scores(_trials(place), out) is None:
        wider = place.tried_at(LADDER[-1])
    return [*wider, *_reported(place, place.rates[len(place.rates) // 2])]
