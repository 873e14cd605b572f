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

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.errors import UserError
from cat_lm.io.readers import Record
from cat_lm.mixers import make_mixer
from cat_lm.options import parse_specification
from eval.common.grids.training import BaseTrial, Step, count_steps, own_loss, steps, train
from eval.recall.model import (
    RecallModel,
    embedding_dropout,
    learned_filters,
    parameters,
)
from eval.recall.ranges import MOST_TOKENS, RANGES
from eval.recall.tasks import Examples, Task, generate, make_task
from eval.recall.train.measuring import free_running, measure, scored_positions
from eval.recall.train.records import FilterRecord, delays

BATCHES = {128: 512, 256: 256, 512: 128, 1024: 64}  # longest L -> rows, as Zoology's Figure 2
STOP_ABOVE = 0.99
# Of what a record says. 1 stopped, and took the best epoch and rate, by the test rows; its cells
# have other names.
PROTOCOL = 2
_TEST_SEED = 10  # added to the seed, as Zoology's
_VALIDATION_SEED = 20


@dataclass(frozen=True)
class Cell:
    """All that decides a result.

    Attributes:
        task, mixer: specifications such as `mqar:keys=8`, `cat:streams=k`.
        layers: none for the mixer's own.
        batch_size: none for Zoology's at that length.
        validation_examples: rows that are looked at after every epoch, apart from test.
        stop_above: validation accuracy after which training stops, and by which the tested step is
            chosen; none: a fixed budget, whose last model is tested.
        eval_steps: also validate (and perhaps stop) every so many steps; none: after epochs alone.
        test_lengths: further lengths to test at, with the task's items in proportion.
        fixed_items: test longer lengths also with as many items as in training.
        embedding_dropout: none for the block's own, as Zoology has it: 0.1, of Mamba's none.
    """

    task: str
    mixer: str
    d_model: int
    seq_len: int
    lr: float = 1e-2
    seed: int = 0
    epochs: int = 64
    train_examples: int = 100_000
    test_examples: int = 3_000
    validation_examples: int = 1_000
    layers: int | None = None
    batch_size: int | None = None
    weight_decay: float = 0.1
    stop_above: float | None = STOP_ABOVE
    eval_steps: int | None = None
    test_lengths: tuple[int, ...] = ()
    fixed_items: bool = False
    embedding_dropout: float | None = None
    protocol: ClassVar[int] = PROTOCOL
    shape: ClassVar[type[Record]] = FilterRecord

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and (problem := allowed.problem(value)):
                raise UserError(f"{name}={value}: {problem}")
        if self.lr <= 0:
            raise UserError(f"lr={self.lr}: must be greater than 0")
        for name in ("train_examples", "test_examples", "validation_examples"):
            if getattr(self, name) * self.seq_len > MOST_TOKENS:
                raise UserError(
                    f"{name}={getattr(self, name)}: with seq_len={self.seq_len} these are more "
                    f"than {MOST_TOKENS:,} tokens"
                )
        if self.fixed_items and not self.test_lengths:
            raise UserError("fixed_items: needs test_lengths, at which items are fixed")

    def make_task(self) -> Task:
        """The task, or a UserError for options that do not fit."""
        name, options = parse_specification(self.task)
        return make_task(name, self.seq_len, options)

    def resolved(self) -> dict[str, Any]:
        """The task and the mixer with all options, and the layers, defaults too; plain values."""
        mixer = make_mixer(self.mixer)
        return {
            "task": self.make_task().describe(),
            "mixer": mixer.describe(),
            "layers": self.layers or mixer.layers,
            "embedding_dropout": embedding_dropout(mixer, self.embedding_dropout),
        }

    def key(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def rows(self) -> int:
        """Rows in a batch."""
        if self.batch_size is not None:
            return self.batch_size
        return next((rows for length, rows in BATCHES.items() if self.seq_len <= length), 64)

    @property
    def all_steps(self) -> int:
        """Steps without an early stop."""
        return count_steps(self.epochs, self.train_examples, self.rows)

    @property
    def kind(self) -> Cell:
        """Equal for cells that differ in learning rate and seed alone, which can stack."""
        return dataclasses.replace(self, lr=1.0, seed=0)

    def steps(self) -> Iterator[Step]:
        """All steps without an early stop, in order."""
        return steps(self.epochs, self.train_examples, self.rows, self.eval_steps)

    @property
    def tested_rows(self) -> float:
        """Rows of the trained length that cost as much as those of all tests do."""
        validations = sum(step.tested for step in self.steps())
        lengths = sum(t / self.seq_len * (1 + self.fixed_items) for t in self.test_lengths)
        return self.validation_examples * validations + self.test_examples * (1 + lengths)

    def timed(self) -> Cell:
        """One step long; equal for cells whose steps cost the same."""
        return dataclasses.replace(
            self.kind,
            lr=1e-9,
            epochs=1,
            train_examples=self.rows,
            test_examples=1,
            validation_examples=1,
            stop_above=None,
            eval_steps=None,
            test_lengths=(),
            fixed_items=False,
        )

    def seconds(self, size: int, device: str) -> tuple[float, float]:
        from eval.recall.train import cost

        return cost.recall_seconds(self, size, device)

    def bytes_needed(self) -> int:
        from eval.recall.train import cost

        return cost.bytes_of(self)

    @staticmethod
    def run_stack(cells: Sequence[Cell], device: str) -> Iterator[tuple[Cell, dict[str, Any]]]:
        from eval.recall.train import stack

        return stack.run_stack(cells, device)

    def derived(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"delays": delays(record["filters"])}

    def score(self, record: dict[str, Any]) -> float:
        """What a rate is chosen by: validation rows."""
        return record["validation"]["accuracy"]

    def told(self, record: dict[str, Any]) -> str:
        return f"accuracy {record['accuracy']:.3f}"

    def run(self, device: str, *, quiet: bool = False) -> dict[str, Any]:
        return run_cell(self, device, quiet=quiet)


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
        self.tests = _tests(cell, self.task)
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
        # One kernel for all parameters where there is a launch to save.
        fused = {"fused": True} if self.inputs.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cell.lr, weight_decay=cell.weight_decay, **fused
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
            "cell": dataclasses.asdict(cell),
            **cell.resolved(),
            "protocol": PROTOCOL,
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
        accuracies["trained length"] |= free_running(trial.model, trial.examples["trained length"])
    return trial.record(accuracies, trained - prepared, time.monotonic() - trained)


def _tests(cell: Cell, task: Task) -> dict[str, Task]:
    """Test name -> task."""
    tests = {"trained length": task}
    if cell.fixed_items and task.with_as_many_keys(task.seq_len) is None:
        raise UserError(f"--fixed-items: {cell.task} has no number of keys to keep")
    for length in cell.test_lengths:
        try:
            tests[f"length {length}"] = task.at_length(length)
            if cell.fixed_items and length > task.seq_len:
                fixed = task.with_as_many_keys(length)
                tests[f"length {length}, {fixed.keys} keys"] = fixed
        except ValueError as error:
            raise UserError(f"--test-lengths {length}: {error}") from None
    return tests


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
