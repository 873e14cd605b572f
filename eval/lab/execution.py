"""Run the cells of a grid: stacks of models in parallel processes, after an estimate."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from cat_lm.core.errors import UserError
from eval.common.interrupts import terminated_as_interrupt
from eval.lab.cell import Cell, finished, run_together
from eval.lab.estimate import hours_by_mixer

if TYPE_CHECKING:
    from eval.lab.places import Run

_SHARE = 0.8  # The fraction of a GPU's free memory for stacks.


@dataclass(frozen=True)
class Execution:
    """The settings for the execution of cells.

    Attributes:
        device: a device name of torch.
        workers: processes at once.
        estimate_only: stop after the estimate.
        stack: models that are trained as one; none: as many as there are of a kind and as fit into
            a GPU's memory, and one on a CPU, where stacks are no faster.
    """

    device: str = "cpu"
    workers: int = 1
    estimate_only: bool = False
    stack: int | None = None


def run_unfinished(
    title: str,
    runs: Sequence[Run],
    out: Path,
    execution: Execution,
    *,
    later: Sequence[Run] = (),
    estimated: bool = False,
) -> bool:
    """Estimate and run the missing cells; return True if all are finished now.

    Args:
        later: runs that will follow, or others as costly: they are estimated too.
        estimated: whether these runs were estimated before.
    """
    todo = {run.cell: run for run in runs if finished(out, run.cell) is None}
    afterwards = {run.cell for run in later if finished(out, run.cell) is None} - todo.keys()
    count = len({run.cell for run in (*runs, *later)})
    print(f"{title}: {count} runs, {len(todo) + len(afterwards)} to do", flush=True)
    groups = stacks(list(todo), execution)
    if not estimated:
        _estimate([*groups, *stacks(list(afterwards), execution)], execution)
    if execution.estimate_only:
        return False
    if todo:
        together = [[todo[cell] for cell in group] for group in groups]
        execute(together, out, execution.device, execution.workers)
    return True


def _estimate(groups: Sequence[Sequence[Cell]], execution: Execution) -> None:
    """Print the estimated duration of groups of cells."""
    largest = max(map(len, groups), default=1)
    if largest > 1:
        alone = sum(len(group) == 1 for group in groups)
        print(f"{len(groups) - alone} stacks of up to {largest} models, {alone} models alone")
    by_mixer = hours_by_mixer(groups, execution.device)
    hours = sum(by_mixer.values())
    workers = execution.workers
    together = f"less with {workers} at once where a stack leaves the GPU idle"
    if torch.device(execution.device).type == "cpu":  # The processes divide the cores among them.
        together = f"{hours / workers:.2f} h with {workers} at once"
    print(f"at most {hours:.2f} {execution.device} hours, {together}")
    costly = sorted(by_mixer, key=by_mixer.__getitem__, reverse=True)
    if costly:
        print("hours by mixer: " + ", ".join(f"{m} {by_mixer[m]:.2f}" for m in costly), flush=True)


def stacks(todo: Sequence[Cell], execution: Execution) -> list[list[Cell]]:
    """Group cells that are trained as one stack; the others form groups of one."""
    kinds: dict[Cell, list[Cell]] = defaultdict(list)
    for cell in todo:
        kinds[cell.kind].append(cell)
    groups = []
    for kind, alike in kinds.items():
        most = execution.stack or (_models_that_fit(kind, execution) if len(alike) > 1 else 1)
        count = -(-len(alike) // most)  # Stacks are as even as possible.
        groups += [
            alike[i * len(alike) // count : (i + 1) * len(alike) // count] for i in range(count)
        ]
    return groups


def _models_that_fit(cell: Cell, execution: Execution) -> int:
    """Return how many models fit into memory beside the other workers'."""
    if torch.device(execution.device).type != "cuda":
        return 1
    free = torch.cuda.mem_get_info(execution.device)[0]
    return max(1, int(_SHARE * free / execution.workers / cell.bytes_needed()))


def execute(groups: Sequence[Sequence[Run]], out: Path, device: str, workers: int) -> None:
    """Run stacks of cells in single-threaded processes; a finished cell has its file."""
    context = multiprocessing.get_context("spawn")
    started, done, count = time.monotonic(), 0, sum(map(len, groups))
    with (
        terminated_as_interrupt(),
        ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool,
    ):
        bar = tqdm(total=count, desc="runs", disable=None)
        try:
            futures = {
                pool.submit(run_together, out, [run.cell for run in group], device): group
                for group in groups
            }
            for future in as_completed(futures):
                for run, record in zip(futures[future], future.result(), strict=True):
                    done += 1
                    bar.update()
                    if bar.disable:
                        where = ", ".join(filter(None, (run.row, run.column, run.line)))
                        where += f", L {run.cell.seq_len}, seed {run.cell.seed}"
                        left = (time.monotonic() - started) / done * (count - done)
                        told = run.cell.summary(record)
                        said = f"{done}/{count} {where}: {told}, {left / 60:.0f} min left"
                        print(said, flush=True)
        except BrokenProcessPool:
            raise UserError(
                "a process of the grid was killed, perhaps for lack of memory: try fewer "
                "--workers; finished runs are kept, and the same command goes on"
            ) from None
        except BaseException:
            # After a signal or a failed cell, the running processes are ended, not waited for.
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            bar.close()


def _start() -> None:
    """Initialise a pool process with one thread, because the processes share the cores.

    A terminal's Ctrl-C reaches them too; the one that started them ends them, and where that is
    killed they end by themselves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    # tqdm's default lock leaks a semaphore if this process is killed.
    tqdm.set_lock(threading.RLock())
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
