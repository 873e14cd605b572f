"""Copies of remote data and packing plans, made before the data are opened: they can take hours."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from cat_lm.config import RunConfig
from cat_lm.data.mixture import Mixture
from cat_lm.data.opening import open_splits
from cat_lm.data.packing import plan_folder
from cat_lm.data.storage import is_remote
from cat_lm.training.distributed import Ranks

POLL_SECONDS = 1.0


def make(
    config: RunConfig, ranks: Ranks, leads: bool, progress: Callable[[str], None]
) -> BaseException | None:
    """Make the copies and plans that the run needs and that are not there yet (a collective).

    One rank of a host makes them, or waits for another's, in a thread; meanwhile all ranks meet, so
    that none seems to hang in a collective, nor behind a lock.

    Args:
        leads: whether this rank is the one of its host.
        progress: told whenever some rank got on, or waited.

    Returns:
        What was wrong, on this rank.
    """
    if config.data.packing != "best_fit" and not any(map(is_remote, config.data.folders)):
        return None
    number, latest = 0, "opening the data"

    def note(what: str) -> None:
        nonlocal number, latest
        number, latest = number + 1, what

    pool = ThreadPoolExecutor(1)
    futures = [pool.submit(_make, config, note)] if leads else []
    pool.shutdown(wait=False)
    known = -1.0
    while True:
        running = wait(futures, POLL_SECONDS).not_done
        busy, done = ranks.sum(len(running), number)
        if done != known:
            known = done
            progress(latest)
        if not busy:
            return futures[0].exception() if futures else None


def _make(config: RunConfig, progress: Callable[[str], object]) -> None:
    data = config.data
    train, validation = (
        split.parts if isinstance(split, Mixture) else [split] for split in open_splits(config)
    )
    for part in (*train, *validation):
        part.fetch(progress)
    if data.packing == "best_fit":
        for part in train:
            plan_folder(part, data.context_length, data.cache_dir, progress)
