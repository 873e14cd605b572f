"""Estimate how long cells take before they run: their steps are timed, and multiplied.

Testing a row costs a third of training on it. Early stops make the truth smaller.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from cat_lm.ops.runtime.cpu import make_process_ready
from eval.lab.cell import out_of_memory_as_error

if TYPE_CHECKING:
    from eval.lab.cell import Cell

FORWARD = 1 / 3  # of a training step's cost
_WARM_UP, _TIMED = 3, 5  # steps on a GPU
_FEW = 32  # on a CPU, at most this share of a batch is timed, and a quarter of that


def hours_by_mixer(groups: Sequence[Sequence[Cell]], device: str) -> dict[str, float]:
    """Hours of all cells without early stops, for each mixer, in one process at a time.

    Args:
        groups: cells that run together; a group's steps are timed together.
    """
    timed: dict[tuple[Cell, int], tuple[float, float]] = {}
    hours: dict[str, float] = defaultdict(float)
    kinds = len({(group[0].timed(), len(group)) for group in groups})
    print(f"timing steps, of {kinds} different ones", flush=True)
    with _one_thread(device):
        for group in tqdm(groups, desc="timing steps", disable=None, leave=False):
            cell = group[0]
            key = (cell.timed(), len(group))
            if key not in timed:
                with out_of_memory_as_error(group, device):
                    timed[key] = key[0].seconds(key[1], device)
                if torch.device(device).type == "cuda":
                    torch.cuda.empty_cache()  # for the processes that will run the cells
            step, row = timed[key]
            seconds = step * cell.all_steps + FORWARD * row * cell.tested_rows
            hours[cell.mixer.partition(":")[0]] += seconds / 3600
    return dict(hours)


def seconds_on_gpu(step: Callable[[int], object], rows: int, device: str) -> tuple[float, float]:
    """Time a step of `rows` rows, and a row of it, after steps that warm the device up."""
    for _ in range(_WARM_UP):
        step(rows)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_TIMED):
        step(rows)
    torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - started) / _TIMED
    return seconds, seconds / rows


def few_rows(rows: int) -> tuple[int, int]:
    """Return the rows of the two steps that are timed on a CPU for steps of `rows`."""
    many = max(1, min(rows, max(4, rows // _FEW)))
    return max(1, many // 4), many


def seconds_on_cpu(step: Callable[[int], object], rows: int) -> tuple[float, float]:
    """Time steps of few rows: a step of `rows`, and a row, follow.

    A step of hundreds of rows would take long to time; it costs a fixed part, and each row as much
    as another.
    """
    return of_few_rows(lambda count: min(_seconds(step, count) for _ in range(2)), rows)


def of_few_rows(seconds: Callable[[int], float], rows: int) -> tuple[float, float]:
    """Return the seconds of a step of `rows`, and of a row, by what steps of few rows take."""
    few, many = few_rows(rows)
    if few == many:
        step = seconds(many)
        return step * rows / many, step / many
    step_of_few, step_of_many = seconds(few), seconds(many)
    row = max(0.0, (step_of_many - step_of_few) / (many - few))
    return step_of_many + row * (rows - many), row


def _seconds(step: Callable[[int], object], rows: int) -> float:
    started = time.perf_counter()
    step(rows)
    return time.perf_counter() - started


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """As in the processes that will run the cells; see execution.py and cells.py."""
    before = torch.get_num_threads()
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
        make_process_ready(device)
    try:
        yield
    finally:
        torch.set_num_threads(before)
