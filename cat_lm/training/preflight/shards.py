"""Verification of the shards: each copy of them is read once, by all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.data.manifest import SPLITS
from cat_lm.data.opening import open_split
from cat_lm.data.verified import Check
from cat_lm.training.distributed import Ranks
from cat_lm.training.watchdog import host_name

# Ranks meet after so many bytes each, so that none waits longer for another than its collectives
# and its watchdog do: two minutes of a slow disk.
ROUND_BYTES = 2**34


def verify(config: RunConfig, ranks: Ranks, progress: Callable[[str], None]) -> list[str]:
    """Read what was not verified yet, shared among the ranks that see the same copy; a collective.

    Args:
        progress: told of the file that this rank reads, each time that some of it is read.

    Returns:
        A line for the log where anything was read.

    Raises:
        SharedError: a file is not what the manifest says; on every rank, the same.
    """
    start = time.perf_counter()
    data = config.data

    def look() -> Check:
        return Check([open_split(data, split) for split in SPLITS], data.cache_dir)

    # One rank of a host looks first: at every start but the first there is nothing more to do,
    # and looking at all files from all ranks would burden a file system of many nodes.
    left = ranks.on_all_ranks(lambda: ranks.local_rank == 0 and bool(look().todo))
    if not any(ranks.gather(left)):
        return []
    check = ranks.on_all_ranks(look)
    seen = ranks.gather((check.copy, len(check.todo), check.size(check.todo)))
    if not any(files for _, files, _ in seen):
        return []
    group = [rank for rank, (copy, *_) in enumerate(seen) if copy == check.copy]
    rounds = [_rounds(check, check.todo[place :: len(group)]) for place in range(len(group))]
    own = rounds[group.index(ranks.rank)]
    most = int(ranks.maximum(max(len(share) for share in rounds)))
    for number in range(most):
        now = own[number] if number < len(own) else []
        ranks.on_all_ranks(lambda now=now: _read(check, now, ranks, progress))
        if ranks.rank == group[0]:
            check.note(
                path for share in rounds for some in share[number : number + 1] for path in some
            )
    copies = {copy: (files, size) for copy, files, size in seen}
    files, size = (sum(column) for column in zip(*copies.values(), strict=True))
    seconds = time.perf_counter() - start
    return [f"data: verified {files:,} files ({size / 1e9:.2f} GB) in {seconds:.1f} s"]


def _rounds(check: Check, paths: Sequence[Path]) -> list[list[Path]]:
    """Cut a rank's files into what it reads between two meetings."""
    rounds: list[list[Path]] = []
    room = 0
    for path in paths:
        size = check.size([path])
        if not rounds or size > room:
            rounds.append([])
            room = ROUND_BYTES
        rounds[-1].append(path)
        room -= size
    return rounds


def _read(
    check: Check, paths: Sequence[Path], ranks: Ranks, progress: Callable[[str], None]
) -> None:
    problems = check.read(paths, progress)
    if problems:
        where = f"{host_name()}: " if ranks.world_size > 1 else ""
        raise UserError(where + problems[0])
