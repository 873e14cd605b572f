"""Run tasks in worker processes, whose failures end the run, and which end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, NoReturn

from cat_lm.core.errors import UserError

Work = Callable[[Any, Callable[[int], None]], Any]
WORKERS_PER_CORE = 8  # More would not help, even if some wait for a network.
POLL_SECONDS = 0.5  # interval of progress updates
SIGNAL_SECONDS = 1.0  # time in which a signal to a whole job also reaches this process
_counter: Any = None  # in a worker: the bytes that all workers have done


def useful_workers(asked: int) -> int:
    """Return the number of workers to start when `asked` are asked for."""
    return min(asked, WORKERS_PER_CORE * len(os.sched_getaffinity(0)))


def run_tasks(
    work: Work,
    tasks: Iterable[Any],
    workers: int,
    progress: Callable[[int], object],
    threads: int = 1,
) -> Iterator[Any]:
    """Yield the results of `work(task, report)` in the order of completion.

    A task is taken from `tasks` only when a worker is free. With one worker and one thread, the
    work is done in this process.

    Args:
        work: a module-level function (workers import it), which calls `report` with the number of
            bytes that it has done.
        progress: called with these numbers in this process.
        threads: number of tokenizer threads per worker.

    Raises:
        UserError: a worker has died. Errors of tasks are raised unchanged.
    """
    if workers == 1 and threads == 1:
        for task in tasks:
            yield work(task, progress)
        return
    workers = useful_workers(workers)
    context = multiprocessing.get_context("spawn")  # Tokenizer threads do not survive a fork.
    counter, seen = context.Value("q"), 0
    pool = ProcessPoolExecutor(workers, context, _init_worker, (counter, threads))
    left, pending = iter(tasks), set[Future]()
    try:
        while True:
            free = islice(left, workers - len(pending))
            pending |= {pool.submit(_run_task, work, task) for task in free}
            if not pending:
                return
            finished, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            done = counter.get_obj().value  # Do not take the lock, which a dead worker may hold.
            progress(done - seen)
            seen = done
            for future in finished:
                yield future.result()
    except BrokenProcessPool:
        # If the whole job was sent SIGTERM, this process is interrupted here.
        time.sleep(SIGNAL_SECONDS)
        raise UserError(
            "a worker process died, most likely for want of memory; run the same command again "
            "with fewer --workers"
        ) from None
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _init_worker(counter: Any, threads: int) -> None:
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # The processes share the cores, so that more threads would slow each other down.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _exit_on_signal(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _end_with_parent() -> NoReturn:
    # A killed parent cannot stop its workers, which would run forever.
    multiprocessing.parent_process().join()
    os._exit(1)


def _run_task(work: Work, task: Any) -> Any:
    try:
        return work(task, _report)
    except SystemExit:  # SIGTERM has ended `work`, after it removed its temporary files.
        os._exit(128 + signal.SIGTERM)


def _report(done: int) -> None:
    with _counter.get_lock():
        _counter.value += done
