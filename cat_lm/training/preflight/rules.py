"""The judgement of the facts of all ranks. A function of them alone, so that all ranks agree."""

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
    building_bytes,
    checkpoint_bytes,
    checkpoints_to_hold,
    describe_kept,
    memory_per_rank,
    num_parameters,
)
from cat_lm.training.preflight.facts import Facts

# A GPU's rank computes in two threads, reads ahead in a third, and NCCL has its own.
FEWEST_CORES = 4
HOSTS_NAMED = 8
# Of the tensor whose all-reduce is timed.
_BYTES = {"cuda": 2**28, "cpu": 2**23}
# GB/s below which an all-reduce within a node, and the part of what GPUs send to other nodes below
# which one between nodes, shows that the fast network is unused.
LEAST_IN_NODE, LEAST_OF_NETWORK = 8.0, 0.1


@dataclass
class PreflightReport:
    """Problems, warnings and notes, each with the ranks that it is about.

    Attributes:
        passing: those of the problems that may be gone at the next start, with nothing changed.
    """

    facts: Sequence[Facts]
    problems: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    warnings: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    passing: set[str] = field(default_factory=set)

    def error(self) -> SharedError:
        """Make one error of all problems, temporary where all of them may pass."""
        lines = self._grouped(self.problems)
        text = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        temporary = self.problems.keys() <= self.passing
        return shared_error(f"preflight:{text}", temporary)

    def lines(self) -> list[str]:
        """Return the lines for the log."""
        warnings = [f"warning: {line}" for line in self._grouped(self.warnings)]
        return [f"preflight: {line}" for line in (*self.notes, *warnings)]

    def _grouped(self, found: dict[str, list[int]]) -> list[str]:
        return [f"{self._who(ranks)}: {text}" for text, ranks in found.items()]

    def _who(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.facts) > 1:
            return "all ranks"
        of_host = defaultdict(list)
        for rank in ranks:
            of_host[self.facts[rank].host].append(rank)
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


def judge(config: RunConfig, facts: Sequence[Facts]) -> PreflightReport:
    """Compare what the ranks saw with each other and with what the run needs.

    Args:
        facts: of all ranks, in their order.
    """
    verdict = PreflightReport(facts)
    hosts = list(dict.fromkeys(fact.host for fact in facts))
    named = ", ".join(hosts) if len(hosts) <= HOSTS_NAMED else f"{hosts[0]} … {hosts[-1]}"
    verdict.notes.append(
        f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on "
        f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} ({named}); "
        + ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())
    )
    for check in (_versions, _configurations, _batch, _sequences, _seen, _data, _needs, _devices):
        check(verdict, config)
    return verdict


def _versions(verdict: PreflightReport, config: RunConfig) -> None:
    for name in dict.fromkeys(name for fact in verdict.facts for name in fact.versions):
        advice = f"install the same {name} on every host"
        if name == "code":
            advice = "copy the same checkout to every host"
        values = [fact.versions.get(name, "absent") for fact in verdict.facts]
        _compare(verdict, verdict.problems, name, values, advice)


def _compare(
    verdict: PreflightReport,
    found: dict[str, list[int]],
    name: str,
    values: Sequence[str],
    advice: str,
) -> None:
    """Name ranks whose value is not the most frequent one; of equally frequent ones, rank 0's."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    others = {
        fact.host for fact, value in zip(verdict.facts, values, strict=True) if value == usual
    }
    for rank, value in enumerate(values):
        if value != usual:
            where = next(iter(others)) if len(others) == 1 else f"{len(others)} other hosts"
            found[f"{name} is {value}, but {usual} on {where}; {advice}"].append(rank)


def _configurations(verdict: PreflightReport, config: RunConfig) -> None:
    first = verdict.facts[0].config
    for fact in verdict.facts:
        for name, (a, b) in changed_values(first, fact.config).items():
            verdict.problems[
                f"{name}={b!r}, but {a!r} on rank 0; start all ranks with the same file "
                "and overrides"
            ].append(fact.rank)


def _batch(verdict: PreflightReport, config: RunConfig) -> None:
    world_size = len(verdict.facts)
    try:
        config.accumulation_steps(world_size)
    except UserError as error:
        verdict.problems[f"{error}; {batch_advice(config, world_size)}"] += range(world_size)


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


def _sequences(verdict: PreflightReport, config: RunConfig) -> None:
    """Name the ranks that share sequences over the network between hosts."""
    parts, facts = config.train.sequence_parallel, verdict.facts
    groups = [facts[start : start + parts] for start in range(0, len(facts), parts)]
    apart = [group for group in groups if len({fact.host for fact in group}) > 1]
    if apart:
        verdict.warnings[
            f"train.sequence_parallel={parts}: neighbours on several hosts share sequences, and "
            "every layer waits for the network between them; a number that divides the ranks of "
            "each host keeps them on one"
        ] += [fact.rank for group in apart for fact in group]


def _seen(verdict: PreflightReport, config: RunConfig) -> None:
    """Take over what ranks found wrong with data, folder and kernels."""
    for fact in verdict.facts:
        for text, passes in fact.problems:
            verdict.problems[text].append(fact.rank)
            if passes:
                verdict.passing.add(text)


def _data(verdict: PreflightReport, config: RunConfig) -> None:
    opened = [fact for fact in verdict.facts if fact.data is not None]
    if not opened:
        return
    first = opened[0]
    for fact in opened[1:]:
        where = f"but on {first.host}"
        if fact.data.fingerprint != first.data.fingerprint:
            verdict.problems[
                f"data: the fingerprint is {fact.data.fingerprint[:12]}, {where} "
                f"{first.data.fingerprint[:12]}; give all hosts the same prepared data"
            ].append(fact.rank)
        elif fact.data.probe != first.data.probe:
            verdict.problems[
                f"data: the same samples read otherwise than on {first.host}, though the "
                "fingerprints are equal; copy the data there again"
            ].append(fact.rank)
    verdict.notes.append(f"data {first.data.fingerprint[:12]}, read on each host")


def _needs(verdict: PreflightReport, config: RunConfig) -> None:
    """Compare disk and memory with what the number of the model's parameters needs."""
    ranks, first = len(verdict.facts), verdict.facts[0]
    vocab_size = next((f.data.vocab_size for f in verdict.facts if f.data is not None), None)
    vocab_size = config.model.vocab_size or vocab_size
    if vocab_size is None:
        return  # The data are missing, which is among the problems already.
    try:
        model_config(config, vocab_size)
    except UserError as error:
        verdict.problems[str(error)] += range(ranks)
        return
    parameters = num_parameters(config, vocab_size)
    _disk(verdict, config, parameters)
    # The first rank builds the whole model on its host, whatever it keeps of it.
    one = building_bytes(config, parameters)
    if one > first.host_memory:
        verdict.problems[
            f"the model of {parameters:,} parameters is built on this host, which takes "
            f"{size(one)}, but {size(first.host_memory)} of memory are free there; take a smaller "
            "model or a larger host; a SLURM job gets all of its nodes' memory by --mem=0"
        ].append(first.rank)
    verdict.notes.append(
        f"host memory: {size(one)} on the first rank's host while it builds the model, "
        f"{size(first.host_memory)} free"
    )
    memory = memory_per_rank(config, parameters, ranks, vocab_size, first.on_gpu)
    of_host = Counter(fact.host for fact in verdict.facts)
    least = None
    for fact in verdict.facts:
        free = fact.free_memory / (1 if fact.on_gpu else of_host[fact.host])
        least = free if least is None else min(least, free)
        where = "GPU memory" if fact.on_gpu else "memory"
        text = (
            f"about {memory.total / GIB:.2f} GiB a rank are needed ({memory}), but "
            f"{free / GIB:.2f} GiB of {where} are free for each; {memory.advice}"
        )
        if memory.states > free or memory.total > free * MEMORY_ACCURACY:
            verdict.problems[text].append(fact.rank)
            # Processes of an earlier start may still hold it.
            if memory.total <= fact.gpu_memory:
                verdict.passing.add(text)
        elif memory.total > free:
            verdict.warnings[text].append(fact.rank)
    verdict.notes.append(
        f"memory: about {memory.total / GIB:.2f} GiB a rank, at least {least / GIB:.2f} GiB free"
    )


def _disk(verdict: PreflightReport, config: RunConfig, parameters: int) -> None:
    one = checkpoint_bytes(parameters)
    looked = [fact for fact in verdict.facts if fact.free_disk is not None]
    needed = checkpoints_to_hold(config, max((f.checkpoints for f in looked), default=0)) * one
    for fact in looked:
        if fact.free_disk < needed:
            verdict.problems[
                f"train.output_dir={config.train.output_dir}: {size(fact.free_disk)} are free, "
                f"but checkpoints of {size(one)} each need {size(needed)}"
            ].append(fact.rank)
    if looked:
        free = min(fact.free_disk for fact in looked)
        verdict.notes.append(
            f"disk: {size(free)} free, a checkpoint takes {size(one)}{describe_kept(config, one)}"
        )


def _devices(verdict: PreflightReport, config: RunConfig) -> None:
    """Name what runs, but only as fast as its slowest rank."""
    facts = verdict.facts
    names = [fact.device for fact in facts]
    _compare(verdict, verdict.warnings, "the device", names, "the slowest one sets the pace")
    of_host = defaultdict(list)
    for fact in facts:
        of_host[fact.host].append(fact)
    for fact in facts:
        on_host = of_host[fact.host]
        together = len(set().union(*(other.cores for other in on_host)))
        own = min(len(fact.cores), together / len(on_host))
        if fact.on_gpu and own < FEWEST_CORES:
            verdict.warnings[
                f"{own:.3g} core{'s' if own > 1 else ''} for a GPU's rank, whose threads need "
                f"{FEWEST_CORES} or more, or the GPU waits for them; ask for more: "
                "--cpus-per-task of launch.slurm, srun and sbatch"
            ].append(fact.rank)


def time_all_reduce(verdict: PreflightReport, ranks: Ranks) -> None:
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
    verdict.notes.append(
        f"all-reduce of {buffer.numel() / 2**18:.0f} MiB among {ranks.world_size} ranks: "
        f"{seconds[-1] * 1e3:.1f} ms, {sent / seconds[-1] / 1e9:.2f} GB/s on the bus"
    )
    del buffer
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    judge_bandwidth(verdict, sent / seconds[-1])


def judge_bandwidth(verdict: PreflightReport, speed: float) -> None:
    """Warn of an all-reduce of so few bytes a second on the bus that the fast network is unused.

    NCCL's own tests reach 0.7 to 0.9 of what the hardware sends; the ways around it, the host's
    memory and TCP, reach a few hundredths. Between nodes a ring has all of a node's ways out.
    """
    per_host = Counter(fact.host for fact in verdict.facts)
    least = LEAST_IN_NODE
    if len(per_host) > 1:
        least = LEAST_OF_NETWORK * ASSUMED_INTERCONNECT * min(per_host.values())
    if verdict.facts[0].on_gpu and speed < least * 1e9:
        verdict.warnings[
            f"the all-reduce's {speed / 1e9:.3g} GB/s are very little, {least:.3g} or more are "
            "usual; is the fast network used (NCCL_DEBUG=INFO tells)?"
        ] += range(len(verdict.facts))


def size(bytes_: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:.1f} {name}"
    return f"{bytes_ / 1024:.1f} KiB"
