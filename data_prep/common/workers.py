"""Worker processes whose failures end the whole run, and which end with their parent."""

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
WORKERS_PER_CORE = 8  # more are of no use, though some may wait for a network
POLL_SECONDS = 0.5  # between looks at the bytes that workers have counted
SIGNAL_SECONDS = 1.0  # for a signal to a whole job to reach this process, too
_counter: Any = None  # of a worker: the bytes that all of them have done


def useful_workers(asked: int) -> int:
    """Return how many of the workers that are asked for are started."""
    return min(asked, WORKERS_PER_CORE * len(os.sched_getaffinity(0)))


def run_tasks(
    work: Work,
    tasks: Iterable[Any],
    workers: int,
    progress: Callable[[int], object],
    threads: int = 1,
) -> Iterator[Any]:
    """Yield the results of `work(task, report)` in the order in which they are finished.

    A task is taken from `tasks` only when a worker is free for it. With one worker and one thread
    the work is done in this process.

    Args:
        work: a function of a module (workers import it), which calls `report` with the bytes that
            it has done.
        progress: gets these bytes in this process.
        threads: of each worker's tokenizer.

    Raises:
        UserError: a worker died, or a task raised it, as it may raise any other error.
    """
    if workers == 1 and threads == 1:
        for task in tasks:
            yield work(task, progress)
        return
    workers = useful_workers(workers)
    context = multiprocessing.get_context("spawn")  # the tokenizers' threads do not survive a fork
    counter, seen = context.Value("q"), 0
    pool = ProcessPoolExecutor(workers, context, _begin, (counter, threads))
    left, pending = iter(tasks), set[Future]()
    try:
        while True:
            free = islice(left, workers - len(pending))
            pending |= {pool.submit(_work, work, task) for task in free}
            if not pending:
                return
            finished, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            done = counter.get_obj().value  # Its lock may be held by a worker that has died.
            progress(done - seen)
            seen = done
            for future in finished:
                yield future.result()
    except BrokenProcessPool:
        # All processes of a job are sent SIGTERM at once: then this one is interrupted here.
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


def _begin(counter: Any, threads: int) -> None:
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, _end)
    # The processes share the cores; threads in each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _end_with_parent() -> NoReturn:
    # A killed parent cannot stop its workers, and they would go on for ever.
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(work: Work, task: Any) -> Any:
    try:
        return work(task, _report)
    except SystemExit:  # of SIGTERM, once `work` has removed its temporary files
        os._exit(128 + signal.SIGTERM)


def _report(done: int) -> None:
    with _counter.get_lock():
        _counter.value += done
