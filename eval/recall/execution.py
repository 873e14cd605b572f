"""Running the cells of a grid: what is left, how long it may take, and parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from eval.recall import cells

if TYPE_CHECKING:
    from eval.recall.cells import AnyCell
    from eval.recall.plan import Run

TIMED_STEPS = 3


@dataclass(frozen=True)
class Execution:
    """How cells are run.

    Attributes:
        device: of torch.
        workers: processes at once.
        estimate_only: stop after the estimate.
    """

    device: str = "cpu"
    workers: int = 1
    estimate_only: bool = False


def run_unfinished(title: str, runs: Sequence[Run], out: Path, execution: Execution) -> bool:
    """Estimates and runs the cells that OUT does not hold; whether all are there now."""
    todo = [run for run in runs if cells.finished(out, run.cell) is None]
    print(f"{title}: {len(runs)} runs, {len(todo)} to do", flush=True)
    device, workers = execution.device, execution.workers
    hours = estimate([run.cell for run in todo], device)
    print(f"at most {hours:.2f} {device} hours, {hours / workers:.2f} h with {workers} at once")
    if execution.estimate_only:
        return False
    execute(todo, out, device, workers)
    return True


def estimate(todo: Sequence[AnyCell], device: str) -> float:
    """Hours of all cells without early stops: each kind of step is timed once, twice at most."""
    seconds: dict[AnyCell, float] = {}
    total = 0.0
    for cell in tqdm(todo, desc="timing steps", disable=None, leave=False):
        kind = cell.timed(TIMED_STEPS)
        if kind not in seconds:
            record = kind.run(device, quiet=True)
            seconds[kind] = record["seconds"]["training"] / TIMED_STEPS
        total += seconds[kind] * cell.all_steps
    return total / 3600


def execute(todo: Sequence[Run], out: Path, device: str, workers: int) -> None:
    """Runs cells in processes of one thread each; a finished one has its file."""
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
        futures = {pool.submit(cells.run, out, run.cell, device, quiet=True): run for run in todo}
        bar = tqdm(total=len(todo), desc="runs", disable=None)
        try:
            for done, future in enumerate(as_completed(futures), 1):
                run, record = futures[future], future.result()
                bar.update()
                if bar.disable:
                    where = f"{run.row}, {run.column}, {run.line}, L {run.cell.seq_len}"
                    left = (time.monotonic() - started) / done * (len(todo) - done)
                    accuracy = f"accuracy {record['accuracy']:.3f}"
                    print(f"{done}/{len(todo)} {where}: {accuracy}, {left / 60:.0f} min left")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            bar.close()


def _start() -> None:
    """One thread a process: the processes share the cores."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
