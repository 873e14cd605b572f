"""Prepare the data before a run: copy, pack, open on each host, and verify by the manifest."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.data import verified
from cat_lm.data.opening import open_data, open_splits
from cat_lm.data.packing import plan_folder
from cat_lm.training.distributed import Ranks
from cat_lm.training.watchdog import host_name

POLL_SECONDS = 1.0
Progress = Callable[[str], object]


class OpenedData(NamedTuple):
    """The identity of the data that a host has opened."""

    fingerprint: str
    vocab_size: int


def run_with_progress(
    ranks: Ranks, action: Callable[[Progress], Any] | None, progress: Progress
) -> Future | None:
    """Run `action` in a thread while all ranks synchronize every second (a collective).

    A long action of one rank then does not look like a hang of the others. `action` (None on ranks
    without one) gets a function to call with a text when a part is done; `progress` is then called
    on every rank. Return the finished future of this rank's action.
    """
    number, latest = 0, "opening the data"

    def note(what: str) -> None:
        nonlocal number, latest
        number, latest = number + 1, what

    pool = ThreadPoolExecutor(1)
    futures = [pool.submit(action, note)] if action is not None else []
    pool.shutdown(wait=False)
    known = -1.0
    while True:
        running = wait(futures, POLL_SECONDS).not_done
        busy, done = ranks.sum(len(running), number)
        if done != known:
            known = done
            progress(latest)
        if not busy:
            return futures[0] if futures else None


def read_data(config: RunConfig, progress: Progress) -> OpenedData:
    """Make the copies and packing plans that the run needs, and read the first sample."""
    data = config.data
    train, validation = open_splits(config)
    for part in (*train.parts, *validation.parts):
        part.fetch(progress)
    if data.packing == "best_fit":
        for part in train.parts:
            plan_folder(part, data.context_length, data.cache_dir, progress)
    corpus, _, loader = open_data(config)
    # As one of as many ranks as a step has samples, read a single sample.
    loader.batch(0, 0, config.train.global_batch_size)
    return OpenedData(corpus.fingerprint, corpus.vocab_size)


def verify(config: RunConfig, ranks: Ranks, progress: Progress) -> list[str]:
    """Verify the shards that were not verified yet, on one rank per host (a collective).

    Rank 0 comes first: hosts that share its files see its notes, too, and read nothing. Return a
    line for the log if files were read. Raises SharedError, equal on every rank, if a file differs
    from the manifest.
    """
    start = time.perf_counter()
    files: set[str] = set()

    def look(note: Progress) -> None:
        def hear(what: str) -> None:
            files.add(what)
            note(what)

        try:
            verified.verify(open_splits(config, look=False), config.data.cache_dir, progress=hear)
        except UserError as error:
            where = f"{host_name()}: " if ranks.world_size > 1 else ""
            raise type(error)(f"{where}{error}") from None

    leads = ranks.local_rank == 0
    for turn in (ranks.is_first, leads and not ranks.is_first):
        read = run_with_progress(ranks, look if turn else None, progress)
        ranks.on_all_ranks(lambda read=read: read and read.result())
    seconds = time.perf_counter() - start
    read = sum(ranks.gather(len(files)))
    return [f"data: verified {read:,} files in {seconds:.1f} s"] if read else []
