"""What cells of recall and of text cost: seconds of a step and a row, and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers import make_mixer
from eval.lab.estimate import few_rows, of_few_rows, seconds_on_cpu, seconds_on_gpu
from eval.recall.tasks import generate
from eval.recall.train import stack, trial
from eval.recall.train.trial import Trial

if TYPE_CHECKING:
    from eval.recall.train.cell import Cell
    from eval.recall.train.language import LanguageCell

_LONG = 2.0  # seconds that one step of a language model must last to be timed by itself


def recall_seconds(cell: Cell, size: int, device: str) -> tuple[float, float]:
    """Seconds of a step of `size` stacked models, and of a row of it."""
    if torch.device(device).type != "cpu":
        return seconds_on_gpu(_steps(cell, size, device), cell.rows, device)
    _, many = few_rows(cell.rows)
    step = _steps(dataclasses.replace(cell, train_examples=many), size, device)
    return seconds_on_cpu(step, cell.rows)


def _steps(cell: Cell, size: int, device: str) -> Callable[[int], object]:
    """Build the call that makes a step of so many rows."""
    if size == 1:
        alone = Trial(cell, device)
        return lambda rows: trial.train_step(alone, slice(0, rows))
    trials = [Trial(cell, device) for _ in range(size)]
    models = stack.Stack([each.model for each in trials])
    return lambda rows: stack.train_step(models, trials, slice(0, rows))


def language_seconds(cell: LanguageCell, device: str) -> tuple[float, float]:
    """The same for a language model, which is never stacked."""

    def step(rows: int) -> float:
        few = dataclasses.replace(cell, batch_size=rows)
        first = few.run(device, quiet=True)["seconds"]["training"]
        more = 1 if first > _LONG else 8
        longer = few.timed(1 + more).run(device, quiet=True)["seconds"]["training"]
        return max(0.0, longer - first) / more

    if torch.device(device).type == "cpu":
        return of_few_rows(step, cell.batch_size)
    seconds = step(cell.batch_size)
    return seconds, seconds / cell.batch_size


def bytes_of(cell: Cell) -> int:
    """Estimate the bytes that training a model takes at most.

    Logits three times, 100 numbers a channel and 8 a pair of positions for each layer, parameters
    with their gradients and moments, the rows.
    """
    task, layers = cell.make_task(), cell.layers or make_mixer(cell.mixer).layers
    scored = int((generate(task, 1, seed=0, split="train").labels != IGNORE_INDEX).sum())
    width, length = cell.d_model, cell.seq_len
    row = 3 * scored * task.vocabulary + layers * length * (100 * width + 8 * length)
    numbers = cell.rows * row + 4 * width * (task.vocabulary + 16 * layers * width)
    return 4 * numbers + 8 * cell.train_examples * (length + 2 * scored)
