"""The judgement of a rank's facts: each rank compares its own with those of rank 0."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from cat_lm.config import RunConfig, changed_values
from cat_lm.core.errors import SharedError, UserError, shared_error
from cat_lm.core.host import GIB
from cat_lm.training.building import model_config
from cat_lm.training.devices import ASSUMED_INTERCONNECT
from cat_lm.training.distributed import Ranks
from cat_lm.training.estimate import (
    MEMORY_ACCURACY,
    Memory,
    building_bytes,
    checkpoint_bytes,
    checkpoints_to_hold,
    describe_kept,
    memory_per_rank,
    num_parameters,
)
from cat_lm.training.preflight.facts import Facts, Place, Problem

# A GPU's rank computes in two threads, reads ahead in a third, and NCCL has its own.
FEWEST_CORES = 4
HOSTS_NAMED = 8
# Of the tensor whose all-reduce is timed.
_BYTES = {"cuda": 2**28, "cpu": 2**23}
# GB/s below which an all-reduce within a node, and the part of what GPUs send to other nodes below
# which one between nodes, shows that the fast network is unused.
LEAST_IN_NODE, LEAST_OF_NETWORK = 8.0, 0.1


@dataclass
class Findings:
    """What a rank finds wrong with itself; notes for the log on the first rank only."""

    problems: list[Problem]
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Report:
    """Problems, warnings and notes of all ranks, each with the ranks that it is about."""

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
        """Make one error of all problems, temporary where all of them may pass."""
        lines = self._grouped(self.problems)
        text = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        return shared_error(f"preflight:{text}", self.passes)

    def lines(self) -> list[str]:
        """Return the lines for the log."""
        warnings = [f"warning: {line}" for line in self._grouped(self.warnings)]
        return [f"preflight: {line}" for line in (*self.notes, *warnings)]

    def _grouped(self, found: dict[str, list[int]]) -> list[str]:
        return [f"{self._who(ranks)}: {text}" for text, ranks in found.items()]

    def _who(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.hosts) > 1:
            return "all ranks"
        of_host = defaultdict(list)
        for rank in ranks:
            of_host[self.hosts[rank]].append(rank)
        named = [f"{host} {ranges(of_host[host])}" for host in list(of_host)[:HOSTS_NAMED]]
        more = len(of_host) - len(named)
        return ", ".join([*named, f"and {more} more hosts"] if more > 0 else named)


def ranges(ranks: Iterable[int]) -> str:
    """Format numbers as `rank 3`, `ranks 24–31`, `ranks 0, 2–3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    several = len(runs) > 1 or len(runs[0]) > 1
    parts = (f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"rank{'s' if several else ''} {', '.join(parts)}"


def examine(config: RunConfig, here: Facts, first: Facts, places: Sequence[Place]) -> Findings:
    """Compare what a rank saw with what rank 0 saw and with what the run needs.

    Args:
        here, first: the facts of the rank and of rank 0.
        places: of all ranks.
    """
    found = Findings(list(here.problems))
    hosts = list(dict.fromkeys(place.host for place in places))
    named = ", ".join(hosts) if len(hosts) <= HOSTS_NAMED else f"{hosts[0]} … {hosts[-1]}"
    found.notes.append(
        f"{len(places)} rank{'s' if len(places) > 1 else ''} on "
        f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} ({named}); "
        + ", ".join(f"{name} {version}" for name, version in first.versions.items())
    )
    _compare(found, here, first, hosts[0])
    try:
        config.accumulation_steps(len(places))
    except UserError as error:
        _problem(found, f"{error}; {batch_advice(config, len(places))}")
    parts = config.train.sequence_parallel
    start = here.rank // parts * parts
    if len({place.host for place in places[start : start + parts]}) > 1:
        found.warnings.append(
            f"train.sequence_parallel={parts}: neighbours on several hosts share sequences, and "
            "every layer waits for the network between them; a number that divides the ranks of "
            "each host keeps them on one"
        )
    on_host = [place.cores for place in places if place.host == places[here.rank].host]
    if first.data is not None:  # else it is a problem already
        vocab_size = config.model.vocab_size or first.data.vocab_size
        try:
            model_config(config, vocab_size)
        except UserError as error:
            _problem(found, str(error))
        else:
            parameters = num_parameters(config, vocab_size)
            _needs(found, config, here, parameters, first.checkpoints)
            memory = memory_per_rank(config, parameters, len(places), vocab_size, here.on_gpu)
            _memory(found, here, memory, 1 if here.on_gpu else len(on_host))
    cores = min(len(places[here.rank].cores), len(frozenset().union(*on_host)) / len(on_host))
    if here.on_gpu and cores < FEWEST_CORES:
        found.warnings.append(
            f"{cores:.3g} core{'s' if cores > 1 else ''} for a GPU's rank, whose threads need "
            f"{FEWEST_CORES} or more, or the GPU waits for them; ask for more: --cpus-per-task of "
            "launch.slurm, srun and sbatch"
        )
    return found


def _problem(found: Findings, text: str, passes: bool = False) -> None:
    found.problems.append(Problem(text, passes))


def _compare(found: Findings, here: Facts, first: Facts, host: str) -> None:
    """Name what differs from rank 0, on `host`."""
    for name in here.versions | first.versions:
        mine, wanted = (facts.versions.get(name, "absent") for facts in (here, first))
        advice = f"install the same {name} on every host"
        if name == "code":
            advice = "copy the same checkout to every host"
        if mine != wanted:
            _problem(found, f"{name} is {mine}, but {wanted} on {host}; {advice}")
    for name, (a, b) in changed_values(first.config, here.config).items():
        _problem(
            found,
            f"{name}={b!r}, but {a!r} on rank 0; start all ranks with the same file and overrides",
        )
    if here.device != first.device:
        found.warnings.append(
            f"the device is {here.device}, but {first.device} on {host}; the slowest one sets the "
            "pace"
        )
    if here.data is None or first.data is None:
        return
    if here.data.fingerprint != first.data.fingerprint:
        _problem(
            found,
            f"data: the fingerprint is {here.data.fingerprint[:12]}, but on {host} "
            f"{first.data.fingerprint[:12]}; give all hosts the same prepared data",
        )
    elif here.data.probe != first.data.probe:
        _problem(
            found,
            f"data: the same samples read otherwise than on {host}, though the fingerprints are "
            "equal; copy the data there again",
        )
    found.notes.append(f"data {first.data.fingerprint[:12]}, read on each host")


def batch_advice(config: RunConfig, world_size: int) -> str:
    """Name what would divide: the largest micro-batch, the nearest numbers of ranks."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    parts, ways = config.train.sequence_parallel, []
    if world_size % parts == 0 and batch % (world_size // parts) == 0:
        share = batch * parts // world_size
        fits = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        ways.append(f"train.micro_batch_size={fits}")
    counts = [n * parts for n in range(1, batch // micro + 1) if batch % (micro * n) == 0]
    near = [max((n for n in counts if n < world_size), default=None)]
    near.append(min((n for n in counts if n > world_size), default=None))
    near = [n for n in near if n is not None]
    ways.append(f"{' or '.join(map(str, near))} rank{'' if near == [1] else 's'}")
    return f"right would be {' or '.join(ways)}"


def _needs(found: Findings, config: RunConfig, here: Facts, parameters: int, saved: int) -> None:
    """Compare the disk, which has `saved` checkpoints, and host memory with what the run needs."""
    one, free = checkpoint_bytes(parameters), here.free_disk
    if free is not None:
        needed = checkpoints_to_hold(config, saved) * one
        if free < needed:
            _problem(
                found,
                f"train.output_dir={config.train.output_dir}: {size(free)} are free, but "
                f"checkpoints of {size(one)} each need {size(needed)}",
            )
        found.notes.append(
            f"disk: {size(free)} free, a checkpoint takes {size(one)}{describe_kept(config, one)}"
        )
    # The first rank builds the whole model on its host, whatever it keeps of it.
    one = building_bytes(config, parameters)
    if here.rank == 0 and one > here.host_memory:
        _problem(
            found,
            f"the model of {parameters:,} parameters is built on this host, which takes "
            f"{size(one)}, but {size(here.host_memory)} of memory are free there; take a smaller "
            "model or a larger host; a SLURM job gets all of its nodes' memory by --mem=0",
        )
    found.notes.append(
        f"host memory: {size(one)} on the first rank's host while it builds the model, "
        f"{size(here.host_memory)} free"
    )


def _memory(found: Findings, here: Facts, memory: Memory, sharing: int) -> None:
    """Compare what a step needs with the memory that is free for so many ranks together."""
    free = here.free_memory / sharing
    text = (
        f"about {memory.total / GIB:.2f} GiB a rank are needed ({memory}), but {free / GIB:.2f} "
        f"GiB of {'GPU memory' if here.on_gpu else 'memory'} are free for each; {memory.advice}"
    )
    if memory.states > free or memory.total > free * MEMORY_ACCURACY:
        # Processes of an earlier start may still hold it.
        _problem(found, text, passes=memory.total <= here.gpu_memory)
    elif memory.total > free:
        found.warnings.append(text)
    found.notes.append(
        f"memory: about {memory.total / GIB:.2f} GiB a rank, {free / GIB:.2f} GiB free"
    )


def time_all_reduce(report: Report, ranks: Ranks) -> None:
    """Note how fast an all-reduce is, and warn where the fast network is not used (a collective).

    The speed is that on the bus: the bytes that a rank sends in a ring, 2 (n − 1) / n of the
    tensor.
    """
    if ranks.world_size == 1:
        return
    buffer = torch.zeros(_BYTES[ranks.device.type] // 4, device=ranks.device)
    seconds = []
    for _ in range(2):  # The first one also makes the connections.
        ranks.barrier()
        start = time.perf_counter()
        torch.distributed.all_reduce(buffer)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        seconds.append(max(ranks.gather(time.perf_counter() - start)))
    sent = 2 * (ranks.world_size - 1) / ranks.world_size * buffer.numel() * 4
    report.notes.append(
        f"all-reduce of {buffer.numel() / 2**18:.0f} MiB among {ranks.world_size} ranks: "
        f"{seconds[-1] * 1e3:.1f} ms, {sent / seconds[-1] / 1e9:.2f} GB/s on the bus"
    )
    if ranks.device.type == "cuda":
        del buffer
        torch.cuda.empty_cache()
        judge_bandwidth(report, sent / seconds[-1])


def judge_bandwidth(report: Report, speed: float) -> None:
    """Warn of an all-reduce of so few bytes a second on the bus that the fast network is unused.

    NCCL's own tests reach 0.7 to 0.9 of what the hardware sends; the ways around it, the host's
    memory and TCP, reach a few hundredths. Between nodes a ring has all of a node's ways out.
    """
    per_host = Counter(report.hosts).values()
    least = LEAST_IN_NODE
    if len(per_host) > 1:
        least = LEAST_OF_NETWORK * ASSUMED_INTERCONNECT * min(per_host)
    if speed < least * 1e9:
        report.warnings[
            f"the all-reduce's {speed / 1e9:.3g} GB/s are very little, {least:.3g} or more are "
            "usual; is the fast network used (NCCL_DEBUG=INFO tells)?"
        ] += range(len(report.hosts))


def size(bytes_: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:.1f} {name}"
    return f"{bytes_ / 1024:.1f} KiB"
