"""Positions of cells in a figure: runs, and places whose learning rate is tuned first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.lab.cell import Cell

NEGATIVE = "none"  # The mixer that mixes nothing, in every panel.
CONTROL = "control"  # The panel row of positive controls.
TUNING_SEED = 10_000  # The first tuning seed; results of tuning seeds are not reported.


@dataclass(frozen=True)
class Run:
    """A cell and its position in a figure: the panel's row and column, and the line.

    Attributes:
        across: what the panel's axis is. Of recall `lengths`, with the cell at all its test
            lengths; `length`, where it trained; or its `width`.
    """

    row: str
    column: str
    line: str
    cell: Cell
    across: str = "length"


@dataclass(frozen=True)
class Place:
    """A point or line of a figure whose learning rate is tuned first.

    Attributes:
        run: the run, whose learning rate and seed are to be set.
        rates: learning rates to choose from, in order.
        seeds: number of runs at the chosen rate.
        trials: number of runs at each rate; the rate with the best mean score is chosen.
    """

    run: Run
    rates: tuple[float, ...]
    seeds: int
    trials: int = 1

    def at(self, rate: float, seed: int) -> Run:
        """Return the place's run with a learning rate and a seed."""
        return replace(self.run, cell=replace(self.run.cell, lr=rate, seed=seed))

    def tried_at(self, rate: float) -> list[Run]:
        """Return the tuning runs of a learning rate."""
        runs = [self.at(rate, TUNING_SEED + number) for number in range(self.trials)]
        return [replace(run, cell=run.cell.choosing()) for run in runs]
