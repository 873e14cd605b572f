"""The judgement of the facts of all ranks. A function of them alone, so that all ranks agree."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from cat_lm.config import RunConfig, changed_values
from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.training.engine import model_config
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
from cat_lm.training.preflight.facts import Facts
from cat_lm.training.preflight.node_rules import judge_nodes
from cat_lm.training.preflight.report import HOSTS_NAMED, PreflightReport

# A rank's device that takes so many times as long as the median one holds all others up.
SLOW_DEVICE = 2.0


def judge(config: RunConfig, facts: Sequence[Facts]) -> PreflightReport:
    """Compares what the ranks saw with each other and with what the run needs.

    Args:
        facts: of all ranks, in their order.
    """
    verdict = PreflightReport(facts)
    hosts = list(dict.fromkeys(fact.host for fact in facts))
    verdict.notes.append(
        f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {_listed(hosts)}; "
        + ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())
    )
    for check in (_versions, _configurations, _batch, _sequences, _data, _needs, _devices):
        check(verdict, config)
    judge_nodes(verdict)
    return verdict


def _listed(hosts: Sequence[str]) -> str:
    if len(hosts) <= HOSTS_NAMED:
        return f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} ({', '.join(hosts)})"
    return f"{len(hosts)} hosts ({hosts[0]} … {hosts[-1]})"


def _versions(verdict: PreflightReport, config: RunConfig) -> None:
    names = dict.fromkeys(name for fact in verdict.facts for name in fact.versions)
    for name in names:
        _compare(
            verdict,
            verdict.problems,
            name,
            [fact.versions.get(name, "absent") for fact in verdict.facts],
            "copy the same checkout to every host"
            if name == "code"
            else f"install the same {name} on every host",
        )


def _compare(
    verdict: PreflightReport,
    kind: dict[str, list[int]],
    name: str,
    values: Sequence[str],
    advice: str,
) -> None:
    """Ranks whose value is not the most frequent one; of equally frequent ones, rank 0's."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    others = {
        fact.host for fact, value in zip(verdict.facts, values, strict=True) if value == usual
    }
    for rank, value in enumerate(values):
        if value != usual:
            where = next(iter(others)) if len(others) == 1 else f"{len(others)} other hosts"
            kind[f"{name} is {value}, but {usual} on {where}; {advice}"].append(rank)


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


def _data(verdict: PreflightReport, config: RunConfig) -> None:
    opened = [fact for fact in verdict.facts if fact.data is not None]
    for fact in verdict.facts:
        if fact.data_problem is not None:
            verdict.problems[fact.data_problem].append(fact.rank)
            if fact.data_may_come:
                verdict.passing.add(fact.data_problem)
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
    """Disk and memory, by the number of the model's parameters."""
    vocab_size = next((f.data.vocab_size for f in verdict.facts if f.data is not None), None)
    vocab_size = config.model.vocab_size or vocab_size
    for fact in verdict.facts:
        if fact.folder is not None and fact.folder.problem is not None:
            text = f"train.output_dir={config.train.output_dir}: {fact.folder.problem}"
            verdict.problems[text].append(fact.rank)
            if fact.folder.may_pass:
                verdict.passing.add(text)
    if vocab_size is None:
        return  # the data are not there, which is said already
    try:
        model_config(config, vocab_size)
    except UserError as error:
        verdict.problems[str(error)] += range(len(verdict.facts))
        return
    parameters = num_parameters(config, vocab_size)
    _disk(verdict, config, parameters)
    on_gpu = verdict.facts[0].on_gpu
    ranks = len(verdict.facts)
    _building(verdict, config, parameters)
    _memory(verdict, memory_per_rank(config, parameters, ranks, vocab_size, on_gpu))


def _disk(verdict: PreflightReport, config: RunConfig, parameters: int) -> None:
    one = checkpoint_bytes(parameters)
    looked = [fact for fact in verdict.facts if fact.folder is not None and not fact.folder.problem]
    saved = max((fact.folder.checkpoints or 0 for fact in looked), default=0)
    needed = checkpoints_to_hold(config, saved) * one
    for fact in looked:
        if fact.folder.free < needed:
            verdict.problems[
                f"train.output_dir={config.train.output_dir}: {size(fact.folder.free)} are free, "
                f"but checkpoints of {size(one)} each need {size(needed)}"
            ].append(fact.rank)
    if looked:
        free = min(fact.folder.free for fact in looked)
        verdict.notes.append(
            f"disk: {size(free)} free, a checkpoint takes {size(one)}{describe_kept(config, one)}"
        )


def _memory(verdict: PreflightReport, memory: Memory) -> None:
    of_host = Counter(fact.host for fact in verdict.facts)
    least = None
    for fact in verdict.facts:
        sharing = 1 if fact.on_gpu else of_host[fact.host]
        free = fact.free_memory / sharing
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


def _building(verdict: PreflightReport, config: RunConfig, parameters: int) -> None:
    """The first rank builds the whole model on its host, whatever it keeps of it."""
    one, first = building_bytes(config, parameters), verdict.facts[0]
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


def _devices(verdict: PreflightReport, config: RunConfig) -> None:
    """Name what cannot run; note what runs, but only as fast as its slowest rank."""
    facts = verdict.facts
    for fact in facts:
        if fact.kernel_problem is not None:
            verdict.problems[
                f"{fact.kernel_problem} (train.conv_backend=reference and train.compile=false do "
                "without them, slowly; of a recurrent model train.mixer_backend=torch, too)"
            ].append(fact.rank)
    kinds = [fact.device for fact in facts]
    _compare(verdict, verdict.warnings, "the device", kinds, "the slowest one sets the pace")
    drivers = [fact.driver for fact in facts]
    _compare(verdict, verdict.warnings, "the driver", drivers, "one version is safer")
    inexact = [fact.rank for fact in facts if fact.versions.get("fp32 products") == "TF32"]
    if inexact:
        verdict.warnings[
            "fp32 matrices are multiplied in TF32 (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), which has 10 "
            "bits of 23; unset it for fp32's own results"
        ] += inexact
    typical = statistics.median(fact.matmul_seconds for fact in facts)
    for fact in facts:
        if len(facts) > 2 and fact.matmul_seconds > SLOW_DEVICE * typical:
            verdict.warnings[
                f"the device multiplies {fact.matmul_seconds / typical:.1f} times as slowly as "
                "the median one; it may be throttled or shared, and all ranks will wait for it"
            ].append(fact.rank)


def size(bytes_: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:.1f} {name}"
    return f"{bytes_ / 1024:.1f} KiB"
