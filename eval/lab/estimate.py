"""Estimate the duration of cells by timing a few of their steps.

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

FORWARD = 1 / 3  # The share of a training step's cost.
_WARM_UP, _TIMED = 3, 5  # The numbers of steps on a GPU.
_FEW = 32  # On a CPU, at most this many rows of a batch are timed, and a quarter of them.


def hours_by_mixer(groups: Sequence[Sequence[Cell]], device: str) -> dict[str, float]:
    """Estimate the total hours of all cells without early stops, by mixer.

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
                    timed[key] = key[0].seconds(device) or step_seconds(
                        key[0].step(key[1], device), cell.rows, device
                    )
                if torch.device(device).type == "cuda":
                    # Leave memory for the processes that will run the cells.
                    torch.cuda.empty_cache()
            step, row = timed[key]
            seconds = step * cell.all_steps + FORWARD * row * cell.tested_rows
            hours[cell.mixer.partition(":")[0]] += seconds / 3600
    return dict(hours)


def step_seconds(step: Callable[[int], object], rows: int, device: str) -> tuple[float, float]:
    """Measure the seconds of a step of `rows` rows, and of a row in it.

    On a CPU steps of few rows are timed, as one of hundreds would take long: it costs a fixed part,
    and each row as much as another.
    """
    if torch.device(device).type != "cpu":
        for _ in range(_WARM_UP):
            step(rows)
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(_TIMED):
            step(rows)
        torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - started) / _TIMED
        return seconds, seconds / rows
    many = max(1, min(rows, max(4, rows // _FEW)))
    few = max(1, many // 4)
    of_many = min(_seconds(step, many) for _ in range(2))
    if few == many:
        return of_many * rows / many, of_many / many
    of_few = min(_seconds(step, few) for _ in range(2))
    row = max(0.0, (of_many - of_few) / (many - few))
    return of_many + row * (rows - many), row


def _seconds(step: Callable[[int], object], rows: int) -> float:
    started = time.perf_counter()
    step(rows)
    return time.perf_counter() - started


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Compute with one thread, as the processes that will run the cells do."""
    before = torch.get_num_threads()
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
        make_process_ready(device)
    try:
        yield
    finally:
        torch.set_num_threads(before)
