"""Training and testing one cell: a task, a mixer, a width, a learning rate, a seed.

Zoology's recipe: AdamW (torch's betas, weight decay 0.1 on all parameters), no warm-up, no
clipping, fp32, a cosine from the learning rate to 0 stepped once an epoch; the same rows in the
same order every epoch. Logits are made at scored positions alone. Here a model trains by itself;
stack.py trains many as one.

Zoology stops, and takes the best epoch, by its test rows. Here validation rows decide both:
training stops when their accuracy is above 0.99 after an epoch, and the model of the best
validation point, the later of equals, is tested. Without that stop the budget is fixed and the last
model is tested. The test rows of all lengths are looked at once, at the end, with this one model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.mixers import make_mixer
from eval.lab.training import BaseTrial, Step, own_loss, train
from eval.recall.model import (
    RecallModel,
    learned_filters,
    parameters,
)
from eval.recall.tasks import Examples, generate
from eval.recall.train.measuring import free_running, measure, scored_positions

if TYPE_CHECKING:
    from eval.recall.train.cell import Cell

_TEST_SEED = 10  # added to the seed, as Zoology's
_VALIDATION_SEED = 20


class Trial(BaseTrial):
    """A cell with all that its training needs, and what it has found.

    Attributes:
        tests: name of a test -> its task; examples: name -> its rows; validation: rows.
        inputs [rows, T], positions [rows, n], targets [rows, n]: the training rows on the device;
            positions are those that are scored.
    """

    def __init__(self, cell: Cell, device: str, make: Callable[..., Examples] = generate) -> None:
        started = time.monotonic()
        self.cell, self.task, self.mixer = cell, cell.make_task(), make_mixer(cell.mixer)
        self.tests = cell.tests()
        torch.manual_seed(cell.seed)
        model = RecallModel(
            self.mixer,
            vocabulary=self.task.vocabulary,
            d_model=cell.d_model,
            positions=max(cell.seq_len, *(t.seq_len for t in self.tests.values())),
            layers=cell.layers,
            dropout=cell.embedding_dropout,
        ).to(device)
        super().__init__(model, "accuracy", cell.stop_above is not None, cell.stop_above)
        train = make(self.task, cell.train_examples, seed=cell.seed, split="train")
        self.inputs, labels = (torch.from_numpy(x).to(device) for x in (train.inputs, train.labels))
        self.positions = scored_positions(labels)
        self.targets = labels.gather(1, self.positions)
        self.examples = {
            name: make(task, cell.test_examples, seed=cell.seed + _TEST_SEED, split="test")
            for name, task in self.tests.items()
        }
        seed = cell.seed + _VALIDATION_SEED
        self.validation = make(self.task, cell.validation_examples, seed=seed, split="validation")
        # One kernel for an update: of models this small it takes a tenth of a step otherwise.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cell.lr, weight_decay=cell.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, cell.epochs, eta_min=0.0
        )
        self.data_seconds = time.monotonic() - started

    def steps(self) -> Iterator[Step]:
        return self.cell.steps()

    @property
    def planned(self) -> tuple[int, int]:
        return self.cell.all_steps, self.cell.epochs

    def step(self, step: Step) -> Tensor:
        return train_step(self, step.rows)

    def validate(self) -> dict[str, float]:
        return measure(self.model, self.validation)

    def end_epoch(self) -> None:
        self.schedule.step()

    def record(
        self, accuracies: dict[str, dict[str, float]], training: float, testing: float
    ) -> dict[str, Any]:
        """Gather what a cell's file gets, as plain values.

        Args:
            accuracies: test -> what it found.
            training, testing: seconds.
        """
        cell = self.cell
        return {
            "cell": cell.key(),
            **cell.resolved(),
            "parameters": parameters(self.model),
            "accuracy": accuracies["trained length"]["accuracy"],
            "validation": {name: self.chosen[name] for name in ("step", "accuracy")},
            "tests": {
                name: {
                    "seq_len": self.tests[name].seq_len,
                    **found,
                    **self.tests[name].one_token(self.examples[name]),
                }
                for name, found in accuracies.items()
            },
            "history": self.history,
            "steps": self.history[-1]["step"],
            "filters": learned_filters(self.model),
            "seconds": {
                "data": round(self.data_seconds, 2),
                "training": round(training, 2),
                "testing": round(testing, 2),
            },
        }


def run_cell(cell: Cell, device: str = "cpu", *, quiet: bool = False) -> dict[str, Any]:
    """Trains and tests a cell by itself.

    Args:
        device: of torch.
        quiet: no progress.

    Returns:
        Plain values: accuracies by test, the history of validation, filters, times.

    Raises:
        UserError: options that do not fit.
    """
    trial = Trial(cell, device)
    prepared = time.monotonic()
    train(trial, quiet)
    trial.restore()
    trained = time.monotonic()
    accuracies = {name: measure(trial.model, rows) for name, rows in trial.examples.items()}
    if trial.task.runs_free:
        for name, rows in trial.examples.items():
            accuracies[name] |= free_running(trial.model, rows)
    return trial.record(accuracies, trained - prepared, time.monotonic() - trained)


def train_step(trial: Trial, rows: slice) -> Tensor:
    """One update; the task's loss before it."""
    trial.model.train()
    own: list[Tensor] = []
    logits = trial.model(trial.inputs[rows], trial.positions[rows], own)
    loss = F.cross_entropy(logits, trial.targets[rows].flatten())
    trial.optimizer.zero_grad(set_to_none=True)
    (loss + own_loss(own)).backward()
    trial.optimizer.step()
    return loss.detach()
