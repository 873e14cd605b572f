"""`python -m launch.doctor CONFIG --ranks 64 --device h100`: a large run looked at from here.

No rank is started. The model is counted without its weights, and samples are assigned to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.training.devices import ASSUMED_INTERCONNECT, Device
from launch.doctor.cost_table import TIGHT, assumptions, cost_lines, facts_of, table
from launch.doctor.costs import ASSUMED_MFU, Cluster, Run, achieved_flops
from launch.doctor.costs import costs as costs_of
from launch.doctor.findings import Finding

# As many ranks' samples are drawn, so that a million ranks take no longer.
MOST_RANKS = 256


@dataclass(frozen=True)
class Scale:
    """The ranks and the machine that are asked for.

    Attributes:
        mfu: the share of its peak that a GPU reaches.
        interconnect: GB/s that a GPU sends to other nodes.
    """

    ranks: int
    gpus_per_node: int = 8
    device: Device | None = None
    mfu: float = ASSUMED_MFU
    interconnect: float = ASSUMED_INTERCONNECT

    def cluster(self, config: RunConfig) -> Cluster:
        """Return the machine as the costs see it; it has a device.

        Raises:
            UserError: the device's peak in the run's precision is not known.
        """
        flops = achieved_flops(config, self.device, self.mfu)
        return Cluster(self.device, self.gpus_per_node, flops, self.interconnect)


class SyntheticCorpus:
    """As many tokens as the run reads, for arithmetic where the data are not there."""

    def __init__(self, num_tokens: int) -> None:
        self.name, self.split = "no data", "train"
        self.num_tokens, self.fingerprint = num_tokens, "synthetic"
        self.parts = (self,)


def batch(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield whether nodes and global batch divide, and what a rank computes."""
    from cat_lm.training.preflight import batch_advice

    ranks, per_node = asked.ranks, asked.gpus_per_node
    nodes, problem = max(1, ranks // per_node), None
    if ranks > per_node and ranks % per_node:
        problem = f"--ranks {ranks}: is not a multiple of --gpus-per-node {per_node}"
    device = f" of {per_node} {asked.device.name}" if asked.device else ""
    text = f"{ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}{device}"
    yield Finding("ranks", text, "nodes", nodes, problem, problem is not None)
    try:
        steps = config.accumulation_steps(ranks)
    except UserError as error:
        problem = f"{error}; {batch_advice(config, ranks)}"
        yield Finding("batch", "", "accumulation", None, problem, broken=True)
        return
    train, parts = config.train, config.train.sequence_parallel
    length = config.data.context_length
    whose = "rank" if parts == 1 else f"group of {parts} ranks ({length // parts} tokens each)"
    text = (
        f"{train.global_batch_size} sequences of {length} a step: "
        f"{train.global_batch_size // config.row_shares(ranks)} a {whose}, "
        f"{train.micro_batch_size} at once, "
        f"{steps} micro-batch{'es' if steps > 1 else ''}"
    )
    yield Finding("batch", text, "accumulation", steps)


def data(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """The data, or that they are not there; and how all ranks' samples make up the batches."""
    from cat_lm.data.loader import TrainLoader
    from cat_lm.data.opening import open_data

    tokens = config.total_steps * config.tokens_per_step
    try:
        corpus, _, loader = open_data(config)
    except UserError as error:
        problem = f"{error}; its arithmetic is that of {tokens:,} tokens that nobody reads"
        yield Finding("data", "", "data", None, problem)
        loader = TrainLoader(
            SyntheticCorpus(tokens + 1),
            config.data.context_length,
            config.train.global_batch_size,
            config.train.seed,
        )
    else:
        epochs = config.total_steps * config.train.global_batch_size / loader.samples_per_epoch
        text = f"{corpus.num_tokens:,} tokens; the run reads {tokens:,}, {epochs:.2f} epochs"
        yield Finding("data", text, "data", corpus.fingerprint)
    parts = config.train.sequence_parallel
    shares = asked.ranks // parts  # whose ranks that share a sequence read the same
    if asked.ranks % parts == 0 and config.train.global_batch_size % shares == 0:
        yield _samples(config, loader, shares, "ranks" if parts == 1 else "groups of ranks")


def _samples(config: RunConfig, loader, ranks: int, named: str = "ranks") -> Finding:
    """Check that the ranks' samples, end to end, are the global batch for any number of ranks.

    Args:
        named: who reads rows of its own.
    """
    import numpy as np

    batch_size, last = config.train.global_batch_size, config.total_steps - 1
    steps = sorted({0, 1, last // 2, last} & set(range(last + 1)))
    sizes = sorted(n for n in {2, ranks // 2, ranks, 2 * ranks} if n and batch_size % n == 0)
    wrong = []
    for step in steps:
        whole = loader.sample_ids(step)
        for size in sizes:
            share = batch_size // size
            # Of very many ranks some are looked at, the first and the last among them.
            looked = sorted({round(n) for n in np.linspace(0, size - 1, min(size, MOST_RANKS))})
            parts = [loader.sample_ids(step, rank, size) for rank in looked]
            right = [whole[share * rank : share * (rank + 1)] for rank in looked]
            if not np.array_equal(np.concatenate(parts), np.concatenate(right)):
                wrong.append(f"step {step} among {size} {named}")
        within_epoch = (step + 1) * batch_size <= loader.samples_per_epoch
        if within_epoch and len(np.unique(whole)) != batch_size:
            wrong.append(f"step {step} repeats samples")
    problem = f"samples are assigned wrongly: {'; '.join(wrong)}" if wrong else None
    text = (
        f"steps {', '.join(map(str, steps))}: the ranks' samples are the global batch, in the same "
        f"order among {', '.join(map(str, sizes))} {named}"
    )
    return Finding("samples", "" if wrong else text, "samples", steps, problem, bool(wrong))


def model(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """The model's parameters and operations, without its weights."""
    from launch.doctor.run_config import vocabulary

    run, train = run_of(config), config.train
    vocab_size, assumed = vocabulary(config)
    text = (
        f"{config.model.architecture} ({config.architecture.summary(config.model).words}), "
        f"{run.parameters:,} parameters, {run.flops_per_token / 1e9:.2f} GFLOPs a token (forward "
        f"and backward), {train.precision}, ZeRO-{train.zero_stage}"
    )
    text += ", activation checkpointing" if train.activation_checkpointing else ""
    text += f", vocabulary taken to be {vocab_size}" if assumed else ""
    yield Finding("model", text, "parameters", run.parameters)
    yield Finding("model", "", "flops_per_token", run.flops_per_token)


def run_of(config: RunConfig) -> Run:
    """Count a configuration's model."""
    from launch.doctor.run_config import vocabulary

    return Run.of(config, vocabulary(config)[0])


def memory(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield what a rank keeps of the model, and the memory of a step."""
    from cat_lm.training.estimate import memory_per_rank, num_parameters
    from launch.doctor.run_config import vocabulary

    vocab_size = vocabulary(config)[0]
    parameters = num_parameters(config, vocab_size)
    needed = memory_per_rank(config, parameters, asked.ranks, vocab_size)
    text, problem, broken = f"about {needed.total / GIB:.1f} GiB a rank ({needed})", None, False
    if asked.device is not None:
        there = asked.device.memory
        text += f" of {there:g} GiB"
        broken = needed.total > there * GIB
        if broken:
            problem = (
                f"about {needed.total / GIB:.1f} GiB a rank do not fit into the "
                f"{there:g} GiB of {asked.device.name}; {needed.advice}"
            )
        elif needed.total > TIGHT * there * GIB:
            problem = f"above {TIGHT:.0%} of the {there:g} GiB of {asked.device.name}: tight"
    yield Finding("memory", text, "memory", needed.total, problem, broken)
    yield _host_memory(config, parameters)


def _host_memory(config: RunConfig, parameters: int) -> Finding:
    """The memory of the first node that the model takes while its first rank builds it."""
    from cat_lm.training.estimate import building_bytes

    needed = building_bytes(config, parameters)
    text = (
        f"{needed / GIB:.1f} GiB of the first node while its first rank builds the model, beside "
        "what the programs take themselves: a SLURM job with more --mem than that, or --mem 0 for "
        "all"
    )
    return Finding("host memory", text, "host_memory", needed)


def schedule(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    from cat_lm.training.schedule import learning_rate

    steps, warmup = config.total_steps, config.steps_of("warmup")
    rates = {step: learning_rate(config, step) for step in (1, max(1, warmup), steps)}
    text = (
        f"{steps:,} steps of {config.tokens_per_step:,} tokens, {warmup:,} of them warm-up; "
        "learning rate " + ", ".join(f"{rate:.2e} at step {step:,}" for step, rate in rates.items())
    )
    yield Finding("schedule", text, "steps", steps)


def checkpoints(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """The size of one, of one rank's file, and of all that the run keeps."""
    from cat_lm.training.estimate import (
        checkpoint_bytes,
        checkpoints_to_hold,
        kept_for_good,
        num_parameters,
    )
    from launch.doctor.run_config import vocabulary

    one = checkpoint_bytes(num_parameters(config, vocabulary(config)[0]))
    most = checkpoints_to_hold(config) + kept_for_good(config)
    text = (
        f"{one / GIB:.1f} GiB each, every {config.checkpoint.every_steps:,} steps; up to "
        f"{most * one / GIB:,.1f} GiB at the end of the run"
    )
    yield Finding("checkpoints", text, "checkpoint", one)


def costs(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield what a step and the whole run take of the device that was asked for."""
    if asked.device is None:
        return
    try:
        config.accumulation_steps(asked.ranks)
        asked.cluster(config).nodes(asked.ranks)
    except UserError as error:
        if config.train.precision == "fp32":
            yield Finding("speed", "", "flops", None, str(error))
        return  # said already, and more clearly
    cluster = asked.cluster(config)
    yield from assumptions(config, cluster, asked.mfu)
    yield from cost_lines(costs_of(run_of(config), cluster, asked.ranks))


ALL = (batch, model, memory, data, schedule, checkpoints, costs)


def examine(config: RunConfig, asked: Scale) -> list[Finding]:
    """All findings; no check raises, so that all that is wrong is known at once."""
    from launch.doctor.findings import guarded

    config = with_precision(config, asked)
    return [finding for check in ALL for finding in guarded(check, config, asked)]


def with_precision(config: RunConfig, asked: Scale) -> RunConfig:
    """Decide an `auto` precision: bf16 on a GPU, else as on this machine."""
    from launch.doctor.run_config import precision_here

    if config.train.precision != "auto":
        return config
    return config.with_precision("bf16" if asked.device else precision_here(config))


def compare(config: RunConfig, asked: Sequence[Scale]) -> tuple[list[Finding], list[str]]:
    """Compare the costs of several numbers of ranks.

    Returns:
        The findings that hold for all, and the lines of a table.

    Raises:
        UserError: with all numbers that are wrong.
    """
    first = asked[0]
    config = with_precision(config, first)
    run, cluster = run_of(config), first.cluster(config)
    found, errors = [], []
    for one in asked:
        try:
            found.append(costs_of(run, cluster, one.ranks))
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError(errors[0] if len(errors) == 1 else "".join(f"\n  {e}" for e in errors))
    shared = [f for check in (model, schedule, checkpoints) for f in check(config, first)]
    shared += [*assumptions(config, cluster, first.mfu), facts_of(found)]
    return shared, table(run, cluster, found)
