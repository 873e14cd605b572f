"""What decides the result of a cell: a task, a mixer, a model and how it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cat_lm.core import numbers
from cat_lm.mixers import Mixer
from eval.common.options import Option
from eval.lab import cell
from eval.lab.cell import Step, plan_steps
from eval.long_range import mixers
from eval.long_range.tasks import Place, Task, make_task

_RECIPE = "(default: the task's in the paper)"
_ROWS = Option("so many of the task's", numbers.ROWS)


@dataclass(frozen=True)
class Settings(cell.Cell):
    """All that decides a result; the defaults of a task are its recipe's (`recipes.py`).

    Attributes:
        task, mixer: specifications such as `listops:max_length=200`, `las:chunk=128`.
        layers, norm, norm_first, pool, is_causal, feed_forward: of the model, see model.py.
        patience: epochs without a better validation until the rate falls to a fifth; None: never.
        eval_steps: also validate within epochs; None: after them alone.
        train_rows, validation_rows, test_rows: of the task's, so many chosen by a fixed draw, the
            same for all seeds; None: all.
        is_shuffled: a control: rows are trained with others' inputs, and so with others' labels.
        place: where data lies; no part of what names a result, `origins.py` compares what is there.
    """

    task: str
    mixer: str
    d_model: Annotated[int, Option(_RECIPE, numbers.SMALL_WIDTH)]
    layers: Annotated[int, Option(_RECIPE, numbers.SMALL_DEPTH)]
    lr: Annotated[float, Option(_RECIPE, numbers.LEARNING_RATE, above=0)]
    batch_size: Annotated[int, Option(_RECIPE, numbers.BATCH)]
    epochs: Annotated[int, Option(_RECIPE, numbers.EPOCHS)]
    norm: Annotated[Literal["layer", "batch"], Option(_RECIPE)] = "layer"
    norm_first: Annotated[bool, Option(_RECIPE)] = True
    pool: Annotated[Literal["mean", "last"], Option(f"what a class is read from {_RECIPE}")] = (
        "mean"
    )
    is_causal: bool = False
    feed_forward: Annotated[bool, Option(_RECIPE)] = True
    weight_decay: Annotated[float, Option(_RECIPE, numbers.WEIGHT_DECAY)] = 0.0
    patience: Annotated[
        int | None,
        Option(
            f"epochs without a better validation until the rate falls {_RECIPE}",
            numbers.EPOCHS,
            word="none",
            metavar="N|none",
        ),
    ] = None
    eval_steps: Annotated[
        int | None, Option("validate within epochs too", numbers.STEPS.at_least(1))
    ] = None
    train_rows: Annotated[int | None, _ROWS] = None
    validation_rows: Annotated[int | None, _ROWS] = None
    test_rows: Annotated[int | None, _ROWS] = None
    is_shuffled: bool = False
    seed: Annotated[int, Option(range=numbers.SEED)] = 0
    place: Place = field(default=Place(), compare=False, repr=False)

    def key(self) -> dict[str, Any]:
        """Return all that decides the result, as plain values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["place"]
        return values | cell.code_of_mixer(self.mixer)

    def make_task(self) -> Task:
        """The task. Raises UserError for options that do not fit."""
        return make_task(self.task)

    def make_mixer(self) -> Mixer:
        """The mixer. Raises UserError for options that do not fit."""
        return mixers.make(self.mixer)

    @property
    def seq_len(self) -> int:
        """Positions of the longest row."""
        return self.make_task().length

    def resolved(self) -> dict[str, Any]:
        return {"task": self.make_task().describe(), "mixer": self.make_mixer().describe()}

    def rows_of(self, split: str) -> int:
        """Count a split's rows at most, before data are looked at."""
        chosen, task = getattr(self, f"{split}_rows"), self.make_task()
        there = getattr(task, split, None) or task.official.get(split)
        there = there or task.official.get("test") or 0  # of a held-out tenth, more than enough
        return there if chosen is None else min(chosen, there or chosen)

    def plan(self) -> Iterator[Step]:
        rows = self.rows_of("train")
        return plan_steps(self.epochs, rows, self.batch_size, self.eval_steps)

    @property
    def tested_rows(self) -> float:
        tests = 2 if self.make_task().classes else 1  # the second with exchanged inputs
        validations = sum(step.tested for step in self.plan())
        return self.rows_of("validation") * validations + tests * self.rows_of("test")
