"""Train one small model: the loop of all cells, validation, and testing.

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
    """A cell's model, optimizer and data, and the results of its training.

    Attributes:
        chosen_by: the number of a validation by which models are chosen, more being better; empty
            where the last model is tested.
        keeps_best: test the model of the best point, the later of equals; else the last one.
        stop_above: stop where the number is above it.
        clip: the largest norm of a gradient.
        optimizer_options: of AdamW, beside the rate and the weight decay, which are the cell's.
        history: a point for each validation.
        chosen: the point of the model to be tested.
        steps: number of steps made.
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
        """Build the model. Raises UserError for incompatible options."""

    @abstractmethod
    def load(self) -> None:
        """Read or make all rows."""

    @abstractmethod
    def batch(self, step: Step) -> Any:
        """Return the rows of a step in the form that `loss` takes."""

    @abstractmethod
    def imitate(self, rows: int) -> Any:
        """Return invented rows with the same cost as real ones, before anything is loaded."""

    @abstractmethod
    def loss(self, batch: Any, own: list[Tensor]) -> Tensor:
        """Return the task's loss; layers append their own losses to `own`."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return the validation metrics, `chosen_by` among them."""

    @abstractmethod
    def test(self) -> dict[str, Any]:
        """Test the model, and return the record's task-specific part."""

    @abstractmethod
    def advance(self, step: Step) -> None:
        """Update the learning rate after a step."""

    def plan(self) -> Iterator[Step]:
        """Yield all steps without an early stop, in order."""
        return self.cell.plan()

    def update(self, batch: Any) -> Tensor:
        """Make one update, and return the task's loss before it."""
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
        """Make an update on invented rows, to time it."""
        self.update(self.imitate(rows))

    def note(self, step: Step, loss: float, found: dict[str, float]) -> bool:
        """Record a validation, keep the best model, and return True if training stops here."""
        self.history.append({"step": step.number, "epoch": step.epoch, "loss": loss, **found})
        value = found.get(self.chosen_by, math.nan)
        if not self.keeps_best or not self._best or value >= self.chosen[self.chosen_by]:
            self.chosen = self.history[-1]
            if self.keeps_best:
                state = self.model.state_dict()
                self._best = {name: value.clone() for name, value in state.items()}
        return self.stop_above is not None and value > self.stop_above

    def restore(self) -> None:
        """Load the parameters of the best validation into the model."""
        if self._best:
            self.model.load_state_dict(self._best)

    def run(self, quiet: bool = False) -> dict[str, Any]:
        """Train and test, and return the record. quiet: no progress bar."""
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
        """Return the values of a cell's file.

        Args:
            found: results of the test.
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
    """Return the weighted mean of the layers' own losses, which is added to the task's."""
    return OWN_WEIGHT * torch.stack(list(losses)).mean() if losses else 0.0


def _report(bar: tqdm, point: dict[str, float], measure: str, epochs: int) -> None:
    text = f"validation {measure} {point[measure]:.4f}, " if measure in point else ""
    text += f"loss {point['loss']:.3f}"
    if bar.disable:
        where = f"step {point['step']}, epoch {point['epoch']}/{epochs}"
        print(f"{where}: {text}", file=sys.stderr, flush=True)
    else:
        bar.set_postfix_str(text)
