"""Estimate how long cells take before they run: their steps are timed, and multiplied.

On a GPU whole steps are timed, after others that warm it up. On a CPU, where a step of hundreds of
rows would take long to time, steps of few rows are, and what all rows cost follows: a step costs a
fixed part, and each row as much as another. Testing a row costs a third of training on it, and a
longer one in proportion to its length. Early stops make the truth smaller.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from eval.recall.train import cells, stack, trial
from eval.recall.train.trial import Cell, Trial

if TYPE_CHECKING:
    from eval.recall.train.cells import AnyCell
    from eval.recall.train.language import LanguageCell

FORWARD = 1 / 3  # of a training step's cost
_WARM_UP, _TIMED = 3, 5  # steps on a GPU
_FEW = 32  # on a CPU, at most this share of a batch is timed, and a quarter of that
_LONG = 2.0  # seconds that one step of a language model must last to be timed by itself


def hours_by_mixer(groups: Sequence[Sequence[AnyCell]], device: str) -> dict[str, float]:
    """Hours of all cells without early stops, for each mixer, in one process at a time.

    Args:
        groups: cells that run together; a group's steps are timed together.
    """
    timed: dict[tuple[AnyCell, int], tuple[float, float]] = {}
    hours: dict[str, float] = defaultdict(float)
    with _one_thread(device):
        for group in tqdm(groups, desc="timing steps", disable=None, leave=False):
            cell = group[0]
            key = (_shortest(cell), len(group))
            if key not in timed:
                with cells.told_out_of_memory(group, device):
                    timed[key] = (_recall if isinstance(cell, Cell) else _language)(*key, device)
                if torch.device(device).type == "cuda":
                    torch.cuda.empty_cache()  # for the processes that will run the cells
            step, row = timed[key]
            seconds = step * cell.all_steps + FORWARD * row * _tested_rows(cell)
            hours[cell.mixer.partition(":")[0]] += seconds / 3600
    return dict(hours)


def _shortest(cell: AnyCell) -> AnyCell:
    """Equal for cells whose steps cost the same: one step long."""
    if not isinstance(cell, Cell):
        return cell.timed(1)
    return dataclasses.replace(
        cell.kind,
        lr=1e-9,
        epochs=1,
        train_examples=cell.rows,
        test_examples=1,
        validation_examples=1,
        stop_above=None,
        eval_steps=None,
        test_lengths=(),
        fixed_items=False,
    )


def _tested_rows(cell: AnyCell) -> float:
    """Rows of the trained length that cost as much as those of all tests do."""
    if not isinstance(cell, Cell):
        return cell.scored_rows
    validations = sum(step.tested for step in cell.steps())
    lengths = sum(t / cell.seq_len * (1 + cell.fixed_items) for t in cell.test_lengths)
    return cell.validation_examples * validations + cell.test_examples * (1 + lengths)


def _recall(cell: Cell, size: int, device: str) -> tuple[float, float]:
    """Seconds of a step of `size` stacked models, and of a row of it."""
    if torch.device(device).type != "cpu":
        step = _steps(cell, size, device)
        for _ in range(_WARM_UP):
            step(cell.rows)
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(_TIMED):
            step(cell.rows)
        torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - started) / _TIMED
        return seconds, seconds / cell.rows
    many = max(1, min(cell.rows, max(4, cell.rows // _FEW)))
    few = max(1, many // 4)
    step = _steps(dataclasses.replace(cell, train_examples=many), size, device)
    seconds = {rows: min(_seconds(step, rows) for _ in range(2)) for rows in (few, many)}
    return _line(seconds, few, many, cell.rows)


def _line(seconds: dict[int, float], few: int, many: int, rows: int) -> tuple[float, float]:
    """(what `rows` rows cost, what one more costs) from what few and many rows do."""
    if few == many:
        return seconds[many] * rows / many, seconds[many] / many
    row = max(0.0, (seconds[many] - seconds[few]) / (many - few))
    return seconds[many] + row * (rows - many), row


def _steps(cell: Cell, size: int, device: str) -> Callable[[int], object]:
    """Build the call that makes a step of so many rows."""
    if size == 1:
        alone = Trial(cell, device)
        return lambda rows: trial.train_step(alone, slice(0, rows))
    trials = [Trial(cell, device) for _ in range(size)]
    models = stack.Stack([each.model for each in trials])
    return lambda rows: stack.train_step(models, trials, slice(0, rows))


def _seconds(step: Callable[[int], object], rows: int) -> float:
    started = time.perf_counter()
    step(rows)
    return time.perf_counter() - started


def _language(cell: LanguageCell, size: int, device: str) -> tuple[float, float]:
    """The same for a language model, which is never stacked: steps of one row on a CPU."""
    rows = cell.batch_size
    if torch.device(device).type == "cpu":
        cell = dataclasses.replace(cell, batch_size=1)
    first = cell.run(device, quiet=True)["seconds"]["training"]
    more = 1 if first > _LONG else 8
    longer = cell.timed(1 + more).run(device, quiet=True)["seconds"]["training"]
    seconds = max(0.0, longer - first) / more * (rows / cell.batch_size)
    return seconds, seconds / rows


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """As in the processes that will run the cells; see execution.py."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if torch.device(device).type == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
