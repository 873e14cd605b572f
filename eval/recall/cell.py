"""A cell of recall: a task, a mixer, a model, how it is trained and how it is tested.

Imports no torch, so that `--help` and wrong options answer at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from cat_lm.core import numbers
from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.core.readers import Versioned
from cat_lm.mixers import Mixer, make_mixer
from eval.common.options import Option
from eval.lab import cell
from eval.lab.cell import Step, plan_steps
from eval.recall.tasks import Task, generate, make_task

# Longest L -> batch size, as in Zoology's Figure 2.
BATCHES = {128: 512, 256: 256, 512: 128, 1024: 64}
DROPOUT = {"layer": 0.1, "rms": 0.0}  # dropout of the embeddings, by the type of block of a mixer
MOST_TOKENS = 2**36  # the most tokens of a split, 8 bytes each
_ROWS = Option(range=numbers.ROWS)


class FilterRecord(Versioned):
    """The schema of the keys that every cell's record has."""

    cell: dict[str, Any]
    filters: list[dict[str, Any]]
    delays: list[dict[str, list[int]]]
    provenance: dict[str, Any]
    seconds: dict[str, float]


class TaskRecord(FilterRecord):
    """The schema of the record of a model that was trained on a task."""

    accuracy: float
    validation: dict[str, Any]
    history: list[dict[str, Any]]
    steps: int
    tests: dict[str, dict[str, Any]]


class FilterCell(cell.Cell):
    """A cell whose model may have filters, of which the record tells the delays.

    A delay is the lag of the largest tap: stream -> one lag a head, for each layer. A layer that
    recalls by single taps has delay(k) = delay(q) + delay(v) + 1.
    """

    def derived(self, record: dict[str, Any]) -> dict[str, Any]:
        delays = [
            {
                stream: [max(range(len(f)), key=lambda i, f=f: abs(f[i])) for f in heads]
                for stream, heads in layer.items()
            }
            for layer in record["filters"]
        ]
        return {"delays": delays}

    def summary(self, record: dict[str, Any]) -> str:
        return f"accuracy {record['accuracy']:.3f}"


@dataclass(frozen=True)
class Cell(FilterCell):
    """All that decides a result.

    Attributes:
        layers: none for the mixer's own.
        batch_size: none for Zoology's at that length.
        validation_examples: rows that are looked at after every epoch, apart from test.
        stop_above: validation accuracy after which training stops, and by which the tested step is
            chosen; none: a fixed budget, whose last model is tested.
        test_lengths: further lengths to test at, with the task's items in proportion.
        embedding_dropout: none for the block's own, as Zoology has it.
    """

    task: str
    mixer: str
    d_model: Annotated[int, Option("model width", numbers.SMALL_WIDTH)]
    seq_len: Annotated[int, Option("tokens per sequence", numbers.SMALL_CONTEXT)]
    lr: Annotated[float, Option("learning rate", numbers.LEARNING_RATE, above=0)] = 1e-2
    seed: Annotated[int, Option(range=numbers.SEED)] = 0
    epochs: Annotated[int, Option(range=numbers.EPOCHS)] = 64
    train_examples: Annotated[int, _ROWS] = 100_000
    test_examples: Annotated[int, _ROWS] = 3_000
    validation_examples: Annotated[int, _ROWS] = 1_000
    layers: Annotated[
        int | None,
        Option("number of blocks (default: the mixer's in the paper)", numbers.SMALL_DEPTH),
    ] = None
    batch_size: Annotated[
        int | None, Option("rows per batch (default: Zoology's at this length)", numbers.BATCH)
    ] = None
    weight_decay: Annotated[
        float, Option("weight decay of all parameters", numbers.WEIGHT_DECAY)
    ] = 0.1
    stop_above: Annotated[
        float | None,
        Option(
            "accuracy on validation rows that stops the training; they then also choose the step "
            "whose model is tested; above 1: "
            "choose only; none: a fixed budget, whose last model is tested",
            numbers.STOP_ACCURACY,
            word="none",
            metavar="ACCURACY|none",
        ),
    ] = 0.99
    eval_steps: Annotated[
        int | None,
        Option("steps between validations within an epoch", numbers.STEPS.at_least(1)),
    ] = None
    test_lengths: Annotated[
        tuple[int, ...],
        Option(
            "further lengths to test at", numbers.SMALL_CONTEXT, metavar="32,64,…", example="64,256"
        ),
    ] = ()
    fixed_items: Annotated[
        bool, Option("at longer lengths also test with the number of keys in training")
    ] = False
    embedding_dropout: Annotated[
        float | None,
        Option(
            "dropout of the embeddings (default: as Zoology's block has it: 0.1, Mamba's none)",
            numbers.DROPOUT,
        ),
    ] = None
    shape: ClassVar[type[Versioned]] = TaskRecord
    trainer: ClassVar[str] = "eval.recall.training"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_examples", "test_examples", "validation_examples"):
            if getattr(self, name) * self.seq_len > MOST_TOKENS:
                raise UserError(
                    f"{name}={getattr(self, name)}: with seq_len={self.seq_len} these are more "
                    f"than {MOST_TOKENS:,} tokens"
                )
        if self.fixed_items and not self.test_lengths:
            raise UserError("fixed_items: needs test_lengths, at which items are fixed")

    def make_task(self) -> Task:
        """Build the task. Raises UserError for options that do not fit."""
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
        """Return the task and mixer with all options, and the layers, including defaults."""
        mixer = make_mixer(self.mixer)
        return {
            "task": self.make_task().describe(),
            "mixer": mixer.describe(),
            "layers": self.layers or mixer.layers,
            "embedding_dropout": dropout_of(mixer, self.embedding_dropout),
        }

    @property
    def rows(self) -> int:
        """Return the number of rows in a batch."""
        if self.batch_size is not None:
            return self.batch_size
        return next((rows for length, rows in BATCHES.items() if self.seq_len <= length), 64)

    @property
    def kind(self) -> Cell:
        """Return a key that is equal for cells that differ only in learning rate and seed, which
        can stack.
        """
        return dataclasses.replace(self, lr=1.0, seed=0)

    def plan(self) -> Iterator[Step]:
        return plan_steps(self.epochs, self.train_examples, self.rows, self.eval_steps)

    @property
    def tested_rows(self) -> float:
        validations = sum(step.tested for step in self.plan())
        lengths = sum(t / self.seq_len * (1 + self.fixed_items) for t in self.test_lengths)
        return self.validation_examples * validations + self.test_examples * (1 + lengths)

    def timed(self) -> Cell:
        few = {"train_examples": self.rows, "test_examples": 1, "validation_examples": 1}
        once = {"lr": 1e-9, "epochs": 1, "stop_above": None, "eval_steps": None}
        return dataclasses.replace(self.kind, **few, **once, test_lengths=(), fixed_items=False)

    def bytes_needed(self) -> int:
        """Estimate the bytes that training takes at most.

        Logits three times, 100 numbers a channel and 8 a pair of positions for each layer,
        parameters with their gradients and moments, the rows.
        """
        task, layers = self.make_task(), self.layers or make_mixer(self.mixer).layers
        scored = int((generate(task, 1, seed=0, split="train").labels != IGNORE_INDEX).sum())
        width, length = self.d_model, self.seq_len
        row = 3 * scored * task.vocabulary + layers * length * (100 * width + 8 * length)
        counted = self.rows * row + 4 * width * (task.vocabulary + 16 * layers * width)
        return 4 * counted + 8 * self.train_examples * (length + 2 * scored)

    def score(self, record: dict[str, Any]) -> float:
        """Return the score that tunes the learning rate, from validation rows."""
        return record["validation"]["accuracy"]


def dropout_of(mixer: Mixer, chosen: float | None = None) -> float:
    """Return the dropout of the embeddings; by default that of the mixer's block in Zoology."""
    return DROPOUT[mixer.kind.block] if chosen is None else chosen
