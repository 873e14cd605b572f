"""Checks of `launch.doctor CONFIG --ranks 64 --device h100`: a large run, of which no rank starts.

The model is counted without its weights. Each check yields findings of one topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.training.devices import ASSUMED_INTERCONNECT, Device
from launch.doctor.cost_table import TIGHT, assumptions, cost_lines, table
from launch.doctor.costs import ASSUMED_MFU, Cluster, Costs, Run, achieved_flops
from launch.doctor.costs import costs as costs_of
from launch.doctor.findings import Finding, guarded


@dataclass(frozen=True)
class Scale:
    """The numbers of ranks and the machine that are asked for.

    Attributes:
        ranks: one number, or several to be compared.
        mfu: the share of its peak that a GPU reaches.
        interconnect: GB/s that a GPU sends to other nodes.
    """

    ranks: tuple[int, ...]
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


def batch(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield whether nodes and global batch divide, and what a rank computes."""
    from cat_lm.training.preflight import batch_advice

    (ranks,), per_node = asked.ranks, asked.gpus_per_node
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


def model(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield the model's parameters and operations, without its weights."""
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
    """Yield the memory of a rank's step, and of the first node while the model is built."""
    from cat_lm.training.estimate import building_bytes, memory_per_rank

    run, (ranks,) = run_of(config), asked.ranks
    needed = memory_per_rank(config, run.parameters, ranks, run.model.vocab_size)
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
    building = building_bytes(config, run.parameters)
    text = (
        f"{building / GIB:.1f} GiB of the first node while its first rank builds the model, beside "
        "what the programs take themselves: a SLURM job with more --mem than that, or --mem 0 for "
        "all"
    )
    yield Finding("host memory", text, "host_memory", building)


def data(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield how often the run reads the data, or that they are not there."""
    from cat_lm.data.opening import open_data

    tokens = config.total_steps * config.tokens_per_step
    try:
        corpus, _, loader = open_data(config)
    except UserError as error:
        problem = f"{error}; the costs are those of {tokens:,} tokens that nobody reads"
        yield Finding("data", "", "data", None, problem)
        return
    epochs = config.total_steps * config.train.global_batch_size / loader.samples_per_epoch
    text = f"{corpus.num_tokens:,} tokens; the run reads {tokens:,}, {epochs:.2f} epochs"
    yield Finding("data", text, "data", corpus.fingerprint)


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
    """Yield the size of one checkpoint and of all that the run keeps."""
    from cat_lm.training.estimate import checkpoint_bytes, checkpoints_to_hold, kept_for_good

    one = checkpoint_bytes(run_of(config).parameters)
    most = checkpoints_to_hold(config) + kept_for_good(config)
    text = (
        f"{one / GIB:.1f} GiB each, every {config.checkpoint.every_steps:,} steps; up to "
        f"{most * one / GIB:,.1f} GiB at the end of the run"
    )
    yield Finding("checkpoints", text, "checkpoint", one)


def examine(config: RunConfig, asked: Scale) -> tuple[list[Finding], list[str]]:
    """Return the findings about a run on one number of ranks, or what several cost.

    Returns:
        The findings, and the lines of the table where there are several numbers.

    Raises:
        UserError: the numbers that are wrong, of several. Of one number it is a finding.
    """
    from launch.doctor.run_config import precision_here

    if config.train.precision == "auto":
        precision = "bf16" if asked.device else precision_here(config)
        config = config.with_precision(precision)
    if len(asked.ranks) == 1:
        checks = (batch, model, memory, data, schedule, checkpoints)
        findings = [finding for check in checks for finding in guarded(check, config, asked)]
        return findings + guarded(costs, config, asked), []
    found = _all_costs(config, asked)
    findings = [f for check in (model, schedule, checkpoints) for f in check(config, asked)]
    findings += assumptions(config, asked.cluster(config), asked.mfu, found)
    return findings, table(run_of(config), asked.cluster(config), found)


def costs(config: RunConfig, asked: Scale) -> Iterator[Finding]:
    """Yield what a step and the whole run take of the device that was asked for."""
    if asked.device is None:
        return
    try:
        cluster = asked.cluster(config)
    except UserError as error:
        yield Finding("speed", "", "flops", None, str(error))
        return
    try:
        found = _all_costs(config, asked)
    except UserError:
        return  # The check `batch` has said why, with advice.
    yield from assumptions(config, cluster, asked.mfu, found)
    yield from cost_lines(found[0])


def _all_costs(config: RunConfig, asked: Scale) -> list[Costs]:
    """Return the costs of each number of ranks; raise UserError for all that are wrong."""
    run, cluster = run_of(config), asked.cluster(config)
    found, errors = [], []
    for ranks in asked.ranks:
        try:
            found.append(costs_of(run, cluster, ranks))
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError(errors[0] if len(errors) == 1 else "".join(f"\n  {e}" for e in errors))
    return found
