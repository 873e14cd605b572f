"""Checks on every rank before step 0, which report all problems together, with their hosts.

`check` runs before the model is built: versions, configuration, data, folder, disk, memory, batch
size, and the checksums of the shards. `dry_run_batch` runs after it: one micro-batch of the largest
shape. Both are collectives. Every rank collects its `facts`, and compares them with rank 0's and
with what the run needs; all ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cat_lm.config import RunConfig, changed_values, load_config
from cat_lm.core.errors import SharedError, UserError, shared_error
from cat_lm.core.host import GIB
from cat_lm.training.building import model_config
from cat_lm.training.distributed import Ranks
from cat_lm.training.estimate import (
    MEMORY_ACCURACY,
    Memory,
    building_bytes,
    check_disk,
    fitting_micro_batch,
    memory_per_rank,
    micro_batch_sizes,
    num_parameters,
    size,
)
from cat_lm.training.preflight import data, facts
from cat_lm.training.preflight.dry_run import dry_run_batch
from cat_lm.training.preflight.facts import Facts, Problem
from cat_lm.training.watchdog import host_name

__all__ = ["check", "dry_run_batch"]

HOSTS_NAMED = 8


def check(
    config: RunConfig, ranks: Ranks, progress: Callable[[str], None] = lambda what: None
) -> tuple[RunConfig, list[str]]:
    """Check everything that needs no model (a collective).

    Args:
        config: the configuration; `train.precision` must not be `auto`.
        progress: called with a text whenever a part of a long action is done.

    Returns:
        The configuration with the micro-batch size instead of `auto`, and lines for the log. Lines
        that begin with "warning: " describe problems that do not prevent the run.

    Raises:
        SharedError: there are problems. The error is equal on every rank and has a line for each
            problem, with the hosts and ranks, the key and value, and what would be right.
    """
    output = Path(config.train.output_dir).absolute()
    hosts = ranks.gather(host_name())
    leads = hosts.index(hosts[ranks.rank]) == ranks.rank  # One rank checks what its host shares.
    probe = facts.Probe(output, ranks.broadcast(secrets.token_hex(8)), hosts[0])
    # Rank 0 makes the folder before others look: a node would remember for a while that it is
    # missing.
    existed, written = ranks.broadcast(ranks.is_first and (os.path.exists(output), probe.write()))
    try:
        read = (lambda note: data.read_data(config, note)) if leads else None
        opened = data.run_with_progress(ranks, read, progress)
        own = probe if leads else None
        here = ranks.on_all_ranks(lambda: facts.collect(config, ranks, opened, own, written))
        first = ranks.broadcast(here)
        config = _choose_micro_batch(config, ranks, hosts, here, first)
        found = ranks.on_all_ranks(lambda: find_problems(config, here, first, hosts))
        report = Report(hosts, ranks.gather(found))
    finally:
        if ranks.is_first:
            probe.remove()
    try:
        if report.problems:
            raise report.error()
        return config, [*report.lines(), *data.verify(config, ranks, progress)]
    except SharedError:
        if ranks.is_first and not existed:
            with contextlib.suppress(OSError):
                os.rmdir(output)  # Remove the empty folder of a run that does not start.
        raise


def _choose_micro_batch(
    config: RunConfig, ranks: Ranks, hosts: Sequence[str], here: Facts, first: Facts
) -> RunConfig:
    """Return the configuration with a value for train.micro_batch_size=auto (a collective).

    The rank with the least memory decides. A resumed run keeps its value, if the number of ranks
    still allows it.
    """
    if first.config["train"]["micro_batch_size"] != "auto":
        return config
    free = min(ranks.gather(here.free_memory / _count_sharing_ranks(here, hosts)))
    sizes = micro_batch_sizes(config, len(hosts))

    def choose() -> int:
        saved = Path(config.train.output_dir) / "config.yaml"
        if config.train.resume != "never" and saved.is_file():
            before = load_config(saved).train.micro_batch_size
            if before in sizes:
                return before
        if first.data is None:
            return 1  # The problem with the data is reported elsewhere.
        vocab_size = config.model.vocab_size or first.data.vocab_size
        parameters = num_parameters(config, vocab_size)
        given = config, parameters, len(hosts), vocab_size, free, here.on_gpu
        return fitting_micro_batch(*given)

    return config.with_micro_batch(ranks.broadcast(ranks.on_rank_zero(choose)))


def _count_sharing_ranks(here: Facts, hosts: Sequence[str]) -> int:
    """Return the number of ranks that share the memory of this rank's device."""
    return 1 if here.on_gpu else hosts.count(hosts[here.rank])


@dataclass
class Findings:
    """The problems and warnings of a rank; only the notes of rank 0 are logged."""

    problems: list[Problem]
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, text: str, passes: bool = False) -> None:
        self.problems.append(Problem(text, passes))


class Report:
    """The problems and warnings of all ranks, each with its ranks, and the notes."""

    def __init__(self, hosts: Sequence[str], found: Sequence[Findings]) -> None:
        self.hosts, self.notes = hosts, list(found[0].notes)
        self.problems: dict[str, list[int]] = defaultdict(list)
        self.warnings: dict[str, list[int]] = defaultdict(list)
        for rank, findings in enumerate(found):
            for problem in findings.problems:
                self.problems[problem.text].append(rank)
            for warning in findings.warnings:
                self.warnings[warning].append(rank)
        every = (problem for findings in found for problem in findings.problems)
        self.passes = all(problem.passes for problem in every)

    def error(self) -> SharedError:
        """Return one error with all problems; it is temporary if all of them are."""
        lines = self._grouped(self.problems)
        text = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        return shared_error(f"preflight:{text}", self.passes)

    def lines(self) -> list[str]:
        """Return the lines for the log."""
        warnings = [f"warning: {line}" for line in self._grouped(self.warnings)]
        return [f"preflight: {line}" for line in (*self.notes, *warnings)]

    def _grouped(self, found: dict[str, list[int]]) -> list[str]:
        return [f"{self._format_hosts(ranks)}: {text}" for text, ranks in found.items()]

    def _format_hosts(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.hosts) > 1:
            return "all ranks"
        of_host = defaultdict(list)
        for rank in ranks:
            of_host[self.hosts[rank]].append(rank)
        named = [f"{host} {format_ranks(of_host[host])}" for host in list(of_host)[:HOSTS_NAMED]]
        more = len(of_host) - len(named)
        return ", ".join([*named, f"and {more} more hosts"] if more > 0 else named)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as `rank 3`, `ranks 24–31`, `ranks 0, 2–3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    several = len(runs) > 1 or len(runs[0]) > 1
    parts = (f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"rank{'s' if several else ''} {', '.join(parts)}"


def find_problems(config: RunConfig, here: Facts, first: Facts, hosts: Sequence[str]) -> Findings:
    """Return the findings about this rank's facts `here`.

    They are compared with those of the `first` rank and with what the run needs.

    Args:
        hosts: the host of every rank.
    """
    found, ranks = Findings(list(here.problems)), len(hosts)
    names = list(dict.fromkeys(hosts))
    named = ", ".join(names) if len(names) <= HOSTS_NAMED else f"{names[0]} … {names[-1]}"
    found.notes.append(
        f"{ranks} rank{'s' if ranks > 1 else ''} on "
        f"{len(names)} host{'s' if len(names) > 1 else ''} ({named}); "
        + ", ".join(f"{name} {version}" for name, version in first.versions.items())
    )
    _compare_ranks(found, here, first, hosts[0])
    try:
        config.accumulation_steps(ranks)
    except UserError as error:
        found.problem(f"{error}; {batch_advice(config, ranks)}")
    if first.data is not None:  # Otherwise rank 0 has reported the problem.
        vocab_size = config.model.vocab_size or first.data.vocab_size
        try:
            model_config(config, vocab_size)
        except UserError as error:
            found.problem(str(error))
        else:
            parameters = num_parameters(config, vocab_size)
            _check_space(found, config, here, parameters, first.checkpoints)
            memory = memory_per_rank(config, parameters, ranks, vocab_size, here.on_gpu)
            _check_memory(found, here, memory, _count_sharing_ranks(here, hosts))
    return found


def _compare_ranks(found: Findings, here: Facts, first: Facts, host: str) -> None:
    """Add the differences of this rank from rank 0, which is on `host`, to the findings."""
    for name in here.versions | first.versions:
        mine, wanted = (facts.versions.get(name, "absent") for facts in (here, first))
        advice = f"install the same {name} on every host"
        if name == "code":
            advice = "copy the same checkout to every host"
        if mine != wanted:
            found.problem(f"{name} is {mine}, but {wanted} on {host}; {advice}")
    for name, (a, b) in changed_values(first.config, here.config).items():
        found.problem(
            f"{name}={b!r}, but {a!r} on rank 0; start all ranks with the same file and overrides",
        )
    if here.data is None or first.data is None:
        return
    if here.data.fingerprint != first.data.fingerprint:
        found.problem(
            f"data: the fingerprint is {here.data.fingerprint[:12]}, but on {host} "
            f"{first.data.fingerprint[:12]}; give all hosts the same prepared data",
        )
    found.notes.append(f"data {first.data.fingerprint[:12]}, read on each host")


def batch_advice(config: RunConfig, world_size: int) -> str:
    """Return the micro-batch size and the numbers of ranks that would divide the batch."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    micro = 1 if micro == "auto" else micro
    parts, ways = config.train.sequence_parallel, []
    if fits := [size for size in micro_batch_sizes(config, world_size) if size <= micro]:
        ways.append(f"train.micro_batch_size={fits[-1]}")
    counts = [n * parts for n in range(1, batch // micro + 1) if batch % (micro * n) == 0]
    near = [max((n for n in counts if n < world_size), default=None)]
    near.append(min((n for n in counts if n > world_size), default=None))
    near = [n for n in near if n is not None]
    ways.append(f"{' or '.join(map(str, near))} rank{'' if near == [1] else 's'}")
    return f"right would be {' or '.join(ways)}"


def _check_space(
    found: Findings, config: RunConfig, here: Facts, parameters: int, saved: int
) -> None:
    """Compare free disk (with `saved` checkpoints on it) and host memory with what is needed."""
    if here.free_disk is not None:
        problem, text = check_disk(config, parameters, here.free_disk, saved)
        if problem:
            found.problem(problem)
        found.notes.append(f"disk: {text}")
    # Rank 0 builds the whole model on its host, even if it keeps only a part of it.
    one = building_bytes(config, parameters)
    if here.rank == 0 and one > here.host_memory:
        found.problem(
            f"the model of {parameters:,} parameters is built on this host, which takes "
            f"{size(one)}, but {size(here.host_memory)} of memory are free there; take a smaller "
            "model or a larger host; a SLURM job gets all of its nodes' memory by --mem=0"
        )
    found.notes.append(
        f"host memory: {size(one)} on the first rank's host while it builds the model, "
        f"{size(here.host_memory)} free"
    )


def _check_memory(found: Findings, here: Facts, memory: Memory, sharing: int) -> None:
    """Compare the memory of a step with the free memory, which `sharing` ranks divide."""
    free = here.free_memory / sharing
    text = (
        f"about {memory.total / GIB:.2f} GiB a rank are needed ({memory}), but {free / GIB:.2f} "
        f"GiB of {'GPU memory' if here.on_gpu else 'memory'} are free for each; {memory.advice}"
    )
    if memory.states > free or memory.total > free * MEMORY_ACCURACY:
        # Processes of an earlier launch may still occupy it.
        found.problem(text, passes=memory.total <= here.gpu_memory)
    elif memory.total > free:
        found.warnings.append(text)
    found.notes.append(
        f"memory: about {memory.total / GIB:.2f} GiB a rank, {free / GIB:.2f} GiB free"
    )
