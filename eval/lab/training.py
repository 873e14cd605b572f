"""Train one small model: the one loop of all cells, validation points, and who is tested.

A trial is a cell with all that its training needs. Tasks differ in the model, the rows, the loss
and the test; the update, validation, the model that is kept and the record are the same for all.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cat_lm.model.attention import OWN_WEIGHT
from eval.lab.cell import Cell, Step


class Trial(ABC):
    """Hold a cell's model, optimizer and rows, and what training has found.

    Attributes:
        chosen_by: the number of a validation by which models are chosen, more being better; empty
            where the last model is tested.
        keeps_best: test the model of the best point, the later of equals; else the last one.
        stop_above: stop where the number is above it.
        clip: the largest norm of a gradient.
        optimizer_options: of AdamW, beside the rate and the weight decay, which are the cell's.
        history: a point for each validation; chosen: that of the model to be tested.
        steps: that were made.
    """

    chosen_by: ClassVar[str] = ""
    clip: ClassVar[float | None] = None
    optimizer_options: ClassVar[dict[str, Any]] = {}
    keeps_best: bool = True
    stop_above: float | None = None

    def __init__(self, cell: Cell, device: str) -> None:
        self.cell, self.device = cell, device
        torch.manual_seed(cell.seed)
        self.model = self.build().to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=cell.lr,
            weight_decay=cell.weight_decay,
            **self.optimizer_options,
        )
        self.history: list[dict[str, float]] = []
        self.chosen: dict[str, float] = {}
        self.steps = 0
        self._best: dict[str, Tensor] = {}

    @abstractmethod
    def build(self) -> nn.Module:
        """Make the model. Raises UserError for options that do not fit."""

    @abstractmethod
    def load(self) -> None:
        """Read or make all rows."""

    @abstractmethod
    def batch(self, step: Step) -> Any:
        """Return the rows of a step, as `loss` takes them."""

    @abstractmethod
    def imitate(self, rows: int) -> Any:
        """Return rows that cost as much as others to train on, before anything is loaded."""

    @abstractmethod
    def loss(self, batch: Any, own: list[Tensor]) -> Tensor:
        """Return the task's loss; layers that have a loss of their own add it to `own`."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Find the numbers of a validation, `chosen_by` among them."""

    @abstractmethod
    def test(self) -> dict[str, Any]:
        """Test the model, and return what the record has beside what all have."""

    @abstractmethod
    def advance(self, step: Step) -> None:
        """Move the learning rate on after a step."""

    def plan(self) -> Iterator[Step]:
        """All steps without an early stop, in order."""
        return self.cell.plan()

    def update(self, batch: Any) -> Tensor:
        """Make one update; the task's loss before it."""
        self.model.train()
        own: list[Tensor] = []
        loss = self.loss(batch, own)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + own_loss(own)).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach()

    def try_step(self, rows: int) -> None:
        """Make an update on rows that are made up, to time it."""
        self.update(self.imitate(rows))

    def note(self, step: Step, loss: float, found: dict[str, float]) -> bool:
        """Keep a validation's point, and the model where it is the best; whether it stops here."""
        self.history.append({"step": step.number, "epoch": step.epoch, "loss": loss, **found})
        value = found.get(self.chosen_by, math.nan)
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

    def run(self, quiet: bool = False) -> dict[str, Any]:
        """Train and test; the record. quiet: no progress."""
        times = [time.monotonic()]
        self.load()
        times.append(time.monotonic())
        self._train(quiet)
        self.restore()
        times.append(time.monotonic())
        found = self.test()
        times.append(time.monotonic())
        data, training, testing = (b - a for a, b in itertools.pairwise(times))
        return self.record(found, data=data, training=training, testing=testing)

    def record(self, found: dict[str, Any], **seconds: float) -> dict[str, Any]:
        """Gather what a cell's file gets, as plain values.

        Args:
            found: what the test found.
        """
        keys = ("step", self.chosen_by) if self.chosen_by else ()
        return {
            "cell": self.cell.key(),
            **self.cell.resolved(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "history": self.history,
            "steps": self.steps,
            **({"validation": {key: self.chosen[key] for key in keys}} if keys else {}),
            **found,
            "seconds": {what: round(seconds, 2) for what, seconds in seconds.items()},
        }

    def _train(self, quiet: bool) -> None:
        plan = list(self.plan())
        bar = tqdm(total=len(plan), disable=True if quiet else None, leave=False)
        for step in plan:
            loss = self.update(self.batch(step))
            self.steps = step.number
            bar.update()
            if step.tested:
                stops = self.note(step, float(loss), self.validate())
                if not quiet:
                    _report(bar, self.history[-1], self.chosen_by, plan[-1].epoch)
                if stops:
                    break
            self.advance(step)
        bar.close()


def own_loss(losses: Sequence[Tensor]) -> Tensor | float:
    """Return what layers' own losses add to the task's: their mean, weighted as in training."""
    return OWN_WEIGHT * torch.stack(list(losses)).mean() if losses else 0.0


def _report(bar: tqdm, point: dict[str, float], measure: str, epochs: int) -> None:
    text = f"validation {measure} {point[measure]:.4f}, " if measure in point else ""
    text += f"loss {point['loss']:.3f}"
    if bar.disable:
        where = f"step {point['step']}, epoch {point['epoch']}/{epochs}"
        print(f"{where}: {text}", file=sys.stderr, flush=True)
    else:
        bar.set_postfix_str(text)
