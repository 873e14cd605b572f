"""Train one small model: the one loop of all cells, validation points, and who is tested.

A trial is a cell with all that its training needs. It computes a step, validates and ends an epoch
in its own way; when that is done, and which model is kept, is the same for all.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cat_lm.model.attention.base import OWN_WEIGHT


class Step(NamedTuple):
    """A step: its number and epoch from 1, its rows, and whether validation and an epoch end it."""

    number: int
    epoch: int
    rows: slice
    tested: bool
    ends_epoch: bool


def count_steps(epochs: int, examples: int, rows: int) -> int:
    """Count steps without an early stop."""
    return epochs * -(-examples // rows)


def steps(epochs: int, examples: int, rows: int, eval_steps: int | None = None) -> Iterator[Step]:
    """All steps without an early stop, in order.

    Args:
        examples: of training; rows: in a batch, the last of an epoch may have fewer.
        eval_steps: validate every so many steps too; none: after epochs alone.
    """
    starts, step = range(0, examples, rows), 0
    for epoch in range(1, epochs + 1):
        for start in starts:
            step += 1
            ends = start == starts[-1]
            tested = ends or (eval_steps is not None and step % eval_steps == 0)
            yield Step(step, epoch, slice(start, start + rows), tested, ends)


class BaseTrial(ABC):
    """What is trained.

    Args:
        model: trained in place.
        chosen_by: the number of a validation by which models are chosen, more being better.
        keeps_best: test the model of the best point, the later of equals; else the last one.
        stop_above: stop where the number is above it.

    Attributes:
        history: a point for each validation; chosen: that of the model to be tested.
    """

    model: nn.Module

    def __init__(
        self, model: nn.Module, chosen_by: str, keeps_best: bool, stop_above: float | None = None
    ) -> None:
        self.model, self.chosen_by = model, chosen_by
        self.keeps_best, self.stop_above = keeps_best, stop_above
        self.history: list[dict[str, float]] = []
        self._best: dict[str, Tensor] = {}

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """All steps, in order."""

    @abstractmethod
    def step(self, step: Step) -> Tensor:
        """Make one update; the loss before it."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Find the numbers of a validation, `chosen_by` among them."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Move the learning rate on."""

    @property
    @abstractmethod
    def planned(self) -> tuple[int, int]:
        """Steps and epochs without an early stop."""

    def note(self, step: Step, loss: float, found: dict[str, float]) -> bool:
        """Keeps a validation's point, and the model where it is the best; whether it stops here."""
        self.history.append({"step": step.number, "epoch": step.epoch, "loss": loss, **found})
        value = found[self.chosen_by]
        if not self.keeps_best or not self._best or value >= self.chosen[self.chosen_by]:
            self.chosen = self.history[-1]
            if self.keeps_best:
                state = self.model.state_dict()
                self._best = {name: value.clone() for name, value in state.items()}
        return self.stop_above is not None and value > self.stop_above

    def restore(self) -> None:
        """Load the parameters of the chosen point into the model."""
        if self._best:
            self.model.load_state_dict(self._best)


def own_loss(losses: Sequence[Tensor]) -> Tensor | float:
    """Return what layers' own losses add to the task's: their mean, weighted as in training."""
    return OWN_WEIGHT * torch.stack(list(losses)).mean() if losses else 0.0


def train(trial: BaseTrial, quiet: bool) -> None:
    """Trains in place. quiet: no progress."""
    planned, epochs = trial.planned
    bar = tqdm(total=planned, disable=True if quiet else None, leave=False)
    for step in trial.steps():
        loss = trial.step(step)
        bar.update()
        if step.tested:
            stops = trial.note(step, float(loss), trial.validate())
            if not quiet:
                _report(bar, trial.history[-1], trial.chosen_by, epochs)
            if stops:
                break
        if step.ends_epoch:
            trial.end_epoch()
    bar.close()


def _report(bar: tqdm, point: dict[str, float], measure: str, epochs: int) -> None:
    text = f"validation {measure} {point[measure]:.4f}, loss {point['loss']:.3f}"
    if bar.disable:
        where = f"step {point['step']}, epoch {point['epoch']}/{epochs}"
        print(f"{where}: {text}", file=sys.stderr, flush=True)
    else:
        bar.set_postfix_str(text)
