"""Training and testing one cell: AdamW, a rate that falls where validation stands still.

Rows come in a new order every epoch. Validation rows choose the epoch whose model is tested, and
nothing else looks at test rows, which are read once, at the end; where a task's protocol makes the
test split its validation (`imdb:protocol=lra`), its page says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.core.errors import UserError
from eval.lab import training
from eval.lab.cell import Step, plan_steps
from eval.long_range.cell import Cell
from eval.long_range.model import LearnedFilter, LongRangeModel
from eval.long_range.tasks import SPLITS, Batch, Examples, Task

FACTOR = 0.2  # factor of the learning rate when validation stops improving
_DRAW = 0  # seed of selected rows
_ORDER, _EXCHANGED = 0, 1  # numbers of the random streams that are derived from a cell's seed


def _load(cell: Cell, task: Task, split: str) -> Examples:
    """Return the rows of a split, as far as the cell uses them."""
    examples = task.load(split, cell.place)
    count, there = getattr(cell, f"{split}_rows"), len(examples)
    if not there:
        raise UserError(
            f"task {cell.task}: its {split} split has no rows; give data that have some"
        )
    if count is not None and count > there:
        raise UserError(
            f"{split}_rows={count}: {cell.task} has {there:,} rows there; ask for no more"
        )
    return examples if count is None else examples.subset(count, _DRAW)


class Trial(training.Trial):
    """The training of one cell."""

    chosen_by = "value"

    def __init__(self, cell: Cell, device: str) -> None:
        self.task = cell.make_task()
        super().__init__(cell, device)
        self._order: np.ndarray | None = None
        self.schedule = None
        if cell.patience is not None:
            # An absolute threshold: a relative one has the wrong sign where R² is below 0.
            self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
                self.optimizer, "max", FACTOR, cell.patience, 1e-4, threshold_mode="abs"
            )

    def build(self) -> LongRangeModel:
        return LongRangeModel(self.cell)

    def load(self) -> None:
        self.examples = {split: _load(self.cell, self.task, split) for split in SPLITS}
        if self.cell.is_shuffled:
            self.examples["train"] = self._with_exchanged_inputs("train")

    def _with_exchanged_inputs(self, split: str) -> Examples:
        """Return a split with permuted inputs, as a control."""
        whole = self.examples[split]
        if whole.labels is None:
            raise UserError(f"is_shuffled: {self.cell.task} has no classes to exchange")
        return whole.exchanged(self._rng(_EXCHANGED, SPLITS.index(split)).permutation(len(whole)))

    def _rng(self, stream: int, number: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([self.cell.seed, stream, number]))
        )

    def plan(self) -> Iterator[Step]:
        cell, rows = self.cell, len(self.examples["train"])
        return plan_steps(cell.epochs, rows, cell.batch_size, cell.eval_steps)

    def batch(self, step: Step) -> Batch:
        if self._order is None:
            self._order = self._rng(_ORDER, step.epoch).permutation(len(self.examples["train"]))
        return self.examples["train"].batch(self._order[step.rows])

    def imitate(self, rows: int) -> Batch:
        task, shape = self.task, (rows,) if self.task.towers == 1 else (rows, self.task.towers)
        if task.vocabulary:
            inputs = np.ones((*shape, task.length), dtype=np.int64)
        else:
            inputs = np.ones((rows, task.length, task.channels), dtype=np.float32)
        labels = np.zeros((rows, task.scored), dtype=np.float32)
        if task.classes:
            labels = np.zeros(rows, dtype=np.int64)
        return Batch(inputs, np.full(shape, task.length, dtype=np.int64), labels)

    def loss(self, batch: Batch, own: list[Tensor]) -> Tensor:
        inputs, lengths, labels = _tensors(batch, self.device)
        compare = F.cross_entropy if self.task.classes else F.mse_loss
        return compare(self.model(inputs, lengths, own), labels)

    def validate(self) -> dict[str, float]:
        return self.measure("validation")

    def advance(self, step: Step) -> None:
        if not step.ends_epoch:
            return
        self._order = None
        if self.schedule is not None:
            self.schedule.step(self.history[-1]["value"])

    def measure(self, split: str) -> dict[str, float]:
        """Return the task's metric on a split as `value`: accuracy, or R²."""
        return {"value": measure(self.model, self.examples[split], 2 * self.cell.batch_size)}

    def measure_exchanged(self) -> float | None:
        """Return the accuracy on test rows with others' inputs; None where values are predicted."""
        if not self.task.classes:
            return None
        return measure(self.model, self._with_exchanged_inputs("test"), 2 * self.cell.batch_size)

    def test(self) -> dict[str, Any]:
        return {
            "layers": self.cell.layers,
            "metric": self.task.metric,
            **self.measure("test"),
            "exchanged": self.measure_exchanged(),
            "notes": list(self.task.notes),
            "data": {
                split: {
                    "rows": len(rows),
                    "most_frequent": most_frequent(rows),
                    "origin": dict(rows.origin),
                }
                for split, rows in self.examples.items()
            },
            # Taps of each layer that has learned filters of values, [H][W].
            "filters": [
                part.taps.detach().cpu().tolist()
                for part in self.model.modules()
                if isinstance(part, LearnedFilter)
            ],
        }


@torch.no_grad()
def measure(model: LongRangeModel, examples: Examples, rows: int) -> float:
    """Return the accuracy; or R² = 1 − squared error / variance over all scored values.

    A model that diverged, whose answers are not all finite, has −inf.

    Args:
        rows: read at once.
    """
    model.eval()
    device = str(next(model.parameters()).device)
    answers, labels = [], []
    for start in range(0, len(examples), rows):
        batch = examples.batch(np.arange(start, min(start + rows, len(examples))))
        inputs, lengths, wanted = _tensors(batch, device)
        found = model(inputs, lengths)
        if not found.isfinite().all():
            return -math.inf
        answers.append((found.argmax(dim=-1) if model.task.classes else found).cpu())
        labels.append(wanted.cpu())
    answered, right = torch.cat(answers), torch.cat(labels)
    if model.task.classes:
        return float((answered == right).double().mean())
    error = (answered.double() - right.double()).square().mean()
    return float(1 - error / right.double().var(correction=0))


def _tensors(batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in batch)


def most_frequent(examples: Examples) -> float | None:
    """Return the share of the most frequent class; None for regression."""
    if examples.labels is None:
        return None
    return float(np.bincount(examples.labels).max() / len(examples))
