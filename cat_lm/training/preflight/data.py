"""The data before a run: copied, packed, opened on each host, and compared with their manifest."""

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


class DataFacts(NamedTuple):
    """The data as a host opened them."""

    fingerprint: str
    vocab_size: int


def meanwhile(
    ranks: Ranks, action: Callable[[Progress], Any] | None, progress: Progress
) -> Future | None:
    """Act in a thread while all ranks meet every second, so that none seems to hang (a collective).

    `action`, of this rank or None, is given a function to call whenever it got on; `progress` is
    then called on every rank.
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


def read_data(config: RunConfig, progress: Progress) -> DataFacts:
    """Make the copies and packing plans that the run needs, and read its first sample."""
    data = config.data
    train, validation = open_splits(config)
    for part in (*train.parts, *validation.parts):
        part.fetch(progress)
    if data.packing == "best_fit":
        for part in train.parts:
            plan_folder(part, data.context_length, data.cache_dir, progress)
    corpus, _, loader = open_data(config)
    # With a rank for every sample of a step, the first one reads one sample.
    loader.batch(0, 0, config.train.global_batch_size)
    return DataFacts(corpus.fingerprint, corpus.vocab_size)


def verify(config: RunConfig, ranks: Ranks, progress: Progress) -> list[str]:
    """Read what was not verified yet, by one rank of a host (a collective).

    Where other hosts see the first one's files, they see its notes too, and read nothing. Returns
    a line for the log where anything was read; raises SharedError, the same on every rank, where a
    file is not what the manifest says.
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
        read = meanwhile(ranks, look if turn else None, progress)
        ranks.on_all_ranks(lambda read=read: read and read.result())
    seconds = time.perf_counter() - start
    read = sum(ranks.gather(len(files)))
    return [f"data: verified {read:,} files in {seconds:.1f} s"] if read else []
