"""What decides the result of a cell: a task, a mixer, a model and how it is trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.mixers import Mixer
from eval.lab import cell
from eval.lab.training import count_steps, steps
from eval.long_range import mixers
from eval.long_range.ranges import RANGES
from eval.long_range.tasks import Place, Task, make_task


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
    d_model: int
    layers: int
    lr: float
    batch_size: int
    epochs: int
    norm: str = "layer"
    norm_first: bool = True
    pool: str = "mean"
    is_causal: bool = False
    feed_forward: bool = True
    weight_decay: float = 0.0
    patience: int | None = None
    eval_steps: int | None = None
    train_rows: int | None = None
    validation_rows: int | None = None
    test_rows: int | None = None
    is_shuffled: bool = False
    seed: int = 0
    place: Place = field(default=Place(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and (problem := allowed.problem(value)):
                raise UserError(f"{name}={value}: {problem}")
        if self.lr <= 0:
            raise UserError(f"lr={self.lr}: must be greater than 0")
        for name, choices in (("norm", ("layer", "batch")), ("pool", ("mean", "last"))):
            if getattr(self, name) not in choices:
                raise UserError(f"{name}={getattr(self, name)}: must be {' or '.join(choices)}")

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

    @property
    def all_steps(self) -> int:
        return count_steps(self.epochs, self.rows_of("train"), self.batch_size)

    @property
    def tested_rows(self) -> float:
        plan = steps(self.epochs, self.rows_of("train"), self.batch_size, self.eval_steps)
        tests = 2 if self.make_task().classes else 1  # the second with exchanged inputs
        return self.rows_of("validation") * sum(s.tested for s in plan) + tests * self.rows_of(
            "test"
        )
