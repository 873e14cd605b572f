"""Checks of every rank before step 0, so that all that is wrong is known at once, per host.

`check` comes before the model is built: versions, configuration, data, folder, disk, memory, batch,
the collectives, and whether the shards are what their manifest says. `dry_run_batch` comes after:
one micro-batch of the largest shape. Both are collectives. A rank collects what it sees (`facts`)
and compares it with rank 0's and with what the run needs (`rules`); all ranks raise one error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from cat_lm.config import RunConfig
from cat_lm.core.errors import SharedError
from cat_lm.training.distributed import Ranks
from cat_lm.training.preflight import data, facts, rules
from cat_lm.training.preflight.dry_run import dry_run_batch
from cat_lm.training.watchdog import host_name

__all__ = ["check", "dry_run_batch"]


def check(
    config: RunConfig, ranks: Ranks, progress: Callable[[str], None] = lambda what: None
) -> list[str]:
    """Look at everything that needs no model (a collective).

    Args:
        config: with its precision decided.
        progress: called with what was done, where it may take long.

    Returns:
        Lines for the log; those that begin with "warning: " name what works but should not be so.

    Raises:
        SharedError: something is wrong; on every rank, the same. A line for each problem names the
            host and the ranks, the key or value, and what would be right.
    """
    output = Path(config.train.output_dir).absolute()
    places = ranks.gather(facts.Place(host_name(), frozenset(os.sched_getaffinity(0))))
    hosts = [place.host for place in places]
    leads = hosts.index(hosts[ranks.rank]) == ranks.rank  # what a host shares is looked at once
    probe = facts.Probe(output, ranks.broadcast(secrets.token_hex(8)), hosts[0])
    # Another node that looked for the folder before it is made would not see it for a while.
    existed, written = ranks.broadcast(ranks.is_first and (os.path.exists(output), probe.write()))
    try:
        read = (lambda note: data.read_data(config, note)) if leads else None
        opened = data.meanwhile(ranks, read, progress)
        own = probe if leads else None
        here = ranks.on_all_ranks(lambda: facts.collect(config, ranks, opened, own, written))
        first = ranks.broadcast(here)
        found = ranks.on_all_ranks(lambda: rules.examine(config, here, first, places))
        report = rules.Report(hosts, ranks.gather(found))
    finally:
        if ranks.is_first:
            probe.remove()
    try:
        if report.problems:
            raise report.error()
        rules.time_all_reduce(report, ranks)
        return [*report.lines(), *data.verify(config, ranks, progress)]
    except SharedError:
        if ranks.is_first and not existed:
            with contextlib.suppress(OSError):
                os.rmdir(output)  # A run that cannot start leaves no empty folder behind.
        raise
