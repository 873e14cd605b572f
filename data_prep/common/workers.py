"""Worker processes that can be stopped at once, and whose failures end the whole run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from cat_lm.core.errors import UserError

Work = Callable[[Any, Callable[[int], None]], Any]
WORKERS_PER_CORE = 8
END_SECONDS = 10.0  # for workers to tidy up after themselves


def useful_workers(asked: int, pieces: int) -> int:
    """Cap --workers at what the pieces of work and this machine's cores can keep busy.

    Some more than there are cores may wait for a network at once; with few pieces, the cores that
    none keeps busy help with the others.
    """
    cores = len(os.sched_getaffinity(0))
    return min(asked, max(cores, min(pieces, WORKERS_PER_CORE * cores)))


def tell_workers(asked: int, pieces: int) -> None:
    """Print where fewer workers than were asked for are of use."""
    if (useful := useful_workers(asked, pieces)) < asked:
        cores = len(os.sched_getaffinity(0))
        print(f"note: --workers {asked}: {useful} for {pieces:,} pieces of work on {cores} cores")


def run_tasks(
    work: Work,
    tasks: Iterable[Any],
    workers: int,
    progress: Callable[[int], None],
    threads: int = 1,
) -> Iterator[Any]:
    """The results of `work(task, report)`, in the order in which they are finished.

    `work` is a function of a module (workers import it); it calls `report` with the bytes it has
    done, which reach `progress` here. A task is taken from `tasks` only when a worker is free for
    it. With one worker and one thread the work is done in this process.
    Raises `UserError` or `OSError` where a task raised it, and `UserError` where a worker died.
    """
    if workers == 1 and threads == 1:
        for task in tasks:
            yield work(task, progress)
        return
    crew = _Crew(work, workers, threads)
    try:
        yield from crew.run(iter(tasks), progress)
    finally:
        crew.stop()


class _Crew:
    def __init__(self, work: Work, workers: int, threads: int) -> None:
        # "spawn" rather than "fork": the tokenizers' threads do not survive a fork.
        self._context = multiprocessing.get_context("spawn")
        self._arguments = (work, threads)
        self._most = workers
        self._members: dict[Connection, multiprocessing.Process] = {}

    def run(self, tasks: Iterator[Any], progress: Callable[[int], None]) -> Iterator[Any]:
        busy: set[Connection] = set()
        idle: list[Connection] = []
        while True:
            while idle or len(self._members) < self._most:
                task = next(tasks, None)
                if task is None:
                    break
                connection = idle.pop() if idle else self._start()
                busy.add(connection)
                self._send(connection, task)
            if not busy:
                return
            for connection in wait(list(busy)):
                kind, value = self._receive(connection)
                if kind == "progress":
                    progress(value)
                    continue
                busy.discard(connection)
                idle.append(connection)
                yield value

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, *self._arguments))
        process.start()
        theirs.close()
        self._members[ours] = process
        return ours

    def _send(self, connection: Connection, task: Any) -> None:
        try:
            connection.send(task)
        except OSError:
            self._mourn(connection)

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            self._mourn(connection)
        if kind == "error":
            raise value
        if kind == "crash":
            raise RuntimeError(f"a worker process failed:\n{value}")
        return kind, value

    def _mourn(self, connection: Connection) -> None:
        process = self._members[connection]
        process.join(END_SECONDS)
        if process.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM):
            raise KeyboardInterrupt  # all processes of a job are sent the signal at once
        raise UserError(
            f"a worker process died (exit code {process.exitcode}), most likely for want of "
            "memory; run the same command again with fewer --workers"
        ) from None

    def stop(self) -> None:
        """Ends all workers, those in the middle of something too."""
        for connection in self._members:
            connection.close()
        for process in self._members.values():
            process.terminate()
        for process in self._members.values():
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(connection: Connection, work: Work, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, _end)
    # The processes share the cores; threads in each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(done: int) -> None:
        connection.send(("progress", done))

    with suppress(EOFError, OSError):  # the parent has no more work, or has gone
        while True:
            task = connection.recv()
            if not multiprocessing.parent_process().is_alive():
                return  # a task may outlive its parent in the pipe, while others begin anew
            try:
                answer = ("result", work(task, report))
            except (UserError, OSError) as error:
                answer = ("error", error)
            except Exception:
                answer = ("crash", traceback.format_exc())
            connection.send(answer)


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _end_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would go on for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)
