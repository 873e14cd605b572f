"""A cell of recall: a task, a mixer, a model, how it is trained and how it is tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from cat_lm.core.readers import Versioned
from cat_lm.mixers import make_mixer
from eval.lab import cell
from eval.lab.training import Step, count_steps, steps
from eval.recall.model import (
    embedding_dropout,
)
from eval.recall.ranges import MOST_TOKENS, RANGES
from eval.recall.tasks import Task, make_task
from eval.recall.train.records import TaskRecord, delays

BATCHES = {128: 512, 256: 256, 512: 128, 1024: 64}  # longest L -> rows, as Zoology's Figure 2
STOP_ABOVE = 0.99


@dataclass(frozen=True)
class Cell(cell.Cell):
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
    shape: ClassVar[type[Versioned]] = TaskRecord

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

    def tests(self) -> dict[str, Task]:
        """Return the tasks that a trained model is tested on, by the tests' names.

        Raises:
            UserError: a task cannot be as long, or the mixer takes no rows of that length.
        """
        task = self.make_task()
        found = {"trained length": task}
        if self.fixed_items and task.with_as_many_keys(task.seq_len) is None:
            raise UserError(f"--fixed-items: {self.task} has no number of keys to keep")
        for length in self.test_lengths:
            try:
                found[f"length {length}"] = task.at_length(length)
                if self.fixed_items and length > task.seq_len:
                    fixed = task.with_as_many_keys(length)
                    found[f"length {length}, {fixed.keys} keys"] = fixed
            except ValueError as error:
                raise UserError(f"--test-lengths {length}: {error}") from None
        mixer, longest = make_mixer(self.mixer), max(t.seq_len for t in found.values())
        if longest > (mixer.kind.longest or longest):
            raise UserError(
                f"{self.mixer}: takes rows of at most {mixer.kind.longest} tokens, not of {longest}"
            )
        return found

    def resolved(self) -> dict[str, Any]:
        """The task and the mixer with all options, and the layers, defaults too; plain values."""
        mixer = make_mixer(self.mixer)
        return {
            "task": self.make_task().describe(),
            "mixer": mixer.describe(),
            "layers": self.layers or mixer.layers,
            "embedding_dropout": embedding_dropout(mixer, self.embedding_dropout),
        }

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
        """Return what a rate is chosen by: validation rows."""
        return record["validation"]["accuracy"]

    def summary(self, record: dict[str, Any]) -> str:
        return f"accuracy {record['accuracy']:.3f}"

    def run(self, device: str, *, quiet: bool = False) -> dict[str, Any]:
        from eval.recall.train import trial

        return trial.run_cell(self, device, quiet=quiet)
