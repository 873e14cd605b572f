"""Checks of `launch.doctor CONFIG --ranks 8,64 --device h100`, which starts no ranks.

The model is built without weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.training.devices import Device
from cat_lm.training.estimate import TIGHT, micro_batch_sizes
from launch.doctor.costs import (
    ASSUMED_MFU,
    HOST_SECONDS_A_LAYER,
    LINK_EFFICIENCY,
    OVERLAP,
    Cluster,
    Costs,
    Run,
    compute_costs,
    with_fitting_micro_batch,
)
from launch.doctor.findings import Finding, run_check
from launch.doctor.run import precision_here, vocabulary

HOST_BOUND = "*"


def collect_findings(
    config: RunConfig, ranks: Sequence[int], cluster: Cluster
) -> tuple[list[Finding], list[str]]:
    """Return the findings about a run on one or several numbers of ranks, and the table of costs.

    Raises:
        UserError: some of several numbers are impossible. With a single number it is a finding.
    """
    if config.train.precision == "auto":
        config = config.with_precision("bf16" if cluster.device else precision_here(config))
    run, is_one = Run.of(config, vocabulary(config)[0]), len(ranks) == 1
    is_auto = config.train.micro_batch_size == "auto"
    if is_auto and cluster.device is None:
        raise UserError("train.micro_batch_size=auto: depends on the ranks' memory: give --device")
    asked = run
    if is_auto and is_one:
        divides = micro_batch_sizes(config, ranks[0])
        fitting = with_fitting_micro_batch(run, ranks[0], cluster.device) if divides else None
        run = replace(run, config=fitting or config.with_micro_batch(1))
    of_one, findings = (run, ranks[0], cluster), []
    for check, given in (
        *((batch, of_one), (model, (run,)), (memory, of_one), (data, (run,))),
        *((schedule, (run,)), (checkpoints, (run,))),
    ):
        if is_one or check in (model, schedule, checkpoints):
            findings += run_check(check, *given)
    is_wrong = any(finding.broken for finding in findings if finding.topic in ("ranks", "batch"))
    if cluster.device is None or is_wrong:
        return findings, []
    if not is_one:
        cluster.flops(run.config)  # Raise a problem of the device once.
    found, errors = [], []
    for number in ranks:
        try:
            found.append(compute_costs(run, cluster, number))
        except UserError as error:
            errors.append(str(error))
    if errors and is_one:
        return [*findings, Finding("speed", "", "flops", None, errors[0])], []
    if errors:
        raise UserError(errors[0] if len(errors) == 1 else "".join(f"\n  {e}" for e in errors))
    return [*findings, *assumptions(run, cluster, found)], table(asked, cluster.device, found)


def batch(run: Run, ranks: int, cluster: Cluster) -> Iterator[Finding]:
    """Yield findings about the nodes and the division of the global batch."""
    from cat_lm.training.preflight import batch_advice

    config, nodes, problem = run.config, max(1, ranks // cluster.gpus_per_node), None
    try:
        cluster.nodes(ranks)
    except UserError as error:
        problem = str(error)
    device = f" of {cluster.gpus_per_node} {cluster.device.name}" if cluster.device else ""
    text = f"{ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}{device}"
    yield Finding("ranks", text, "nodes", nodes, problem, problem is not None)
    try:
        steps = config.accumulation_steps(ranks)
    except UserError as error:
        problem = f"{error}; {batch_advice(config, ranks)}"
        yield Finding("batch", "", "accumulation", None, problem, broken=True)
        return
    train, parts, length = config.train, config.train.sequence_parallel, config.data.context_length
    whose = "rank" if parts == 1 else f"group of {parts} ranks ({length // parts} tokens each)"
    text = (
        f"{train.global_batch_size} sequences of {length} a step: "
        f"{train.global_batch_size // config.count_rank_groups(ranks)} a {whose}, "
        f"{train.micro_batch_size} at once, "
        f"{steps} micro-batch{'es' if steps > 1 else ''}"
    )
    yield Finding("batch", text, "accumulation", steps)


def model(run: Run) -> Iterator[Finding]:
    """Yield the model's parameters and FLOPs per token."""
    config, train = run.config, run.config.train
    text = (
        f"{config.model.architecture} ({config.architecture.summary(config.model).words}), "
        f"{run.parameters:,} parameters, {run.flops_per_token / 1e9:.2f} GFLOPs a token (forward "
        f"and backward), {train.precision}, ZeRO-{train.zero_stage}"
    )
    text += ", activation checkpointing" if train.activation_checkpointing else ""
    text += f", vocabulary taken to be {run.vocab_size}" if vocabulary(config)[1] else ""
    yield Finding("model", text, "parameters", run.parameters)
    yield Finding("model", "", "flops_per_token", run.flops_per_token)


def memory(run: Run, ranks: int, cluster: Cluster) -> Iterator[Finding]:
    """Yield the device memory of a rank, and the host memory for building the model."""
    from cat_lm.training.estimate import building_bytes, memory_per_rank

    needed = memory_per_rank(run.config, run.parameters, ranks, run.vocab_size)
    text, problem, broken = f"about {needed.total / GIB:.1f} GiB a rank ({needed})", None, False
    if there := cluster.device:
        share = needed.total / GIB / there.memory
        text, broken = f"{text} of {there.memory:g} GiB", share > 1
        if broken:
            problem = (
                f"about {needed.total / GIB:.1f} GiB a rank do not fit into the {there.memory:g} "
                f"GiB of {there.name}; {needed.advice}"
            )
        elif share > TIGHT:
            problem = f"above {TIGHT:.0%} of the {there.memory:g} GiB of {there.name}: tight"
    yield Finding("memory", text, "memory", needed.total, problem, broken)
    building = building_bytes(run.config, run.parameters)
    text = (
        f"{building / GIB:.1f} GiB of the first node while its first rank builds the model, beside "
        "what the programs take themselves: a SLURM job with more --mem than that, or --mem 0 for "
        "all"
    )
    yield Finding("host memory", text, "host_memory", building)


def data(run: Run) -> Iterator[Finding]:
    """Yield the number of epochs, or the problem with the data."""
    from cat_lm.data.opening import open_data

    config = run.config
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


def schedule(run: Run) -> Iterator[Finding]:
    from cat_lm.training.schedule import learning_rate

    config = run.config
    steps, warmup = config.total_steps, config.steps_of("warmup")
    rates = {step: learning_rate(config, step) for step in (1, max(1, warmup), steps)}
    text = (
        f"{steps:,} steps of {config.tokens_per_step:,} tokens, {warmup:,} of them warm-up; "
        "learning rate " + ", ".join(f"{rate:.2e} at step {step:,}" for step, rate in rates.items())
    )
    yield Finding("schedule", text, "steps", steps)


def checkpoints(run: Run) -> Iterator[Finding]:
    """Yield the size of a checkpoint, and of all that the run keeps."""
    from cat_lm.training.estimate import (
        checkpoint_bytes,
        count_permanent_checkpoints,
        count_stored_checkpoints,
    )

    one = checkpoint_bytes(run.config, run.parameters)
    most = count_stored_checkpoints(run.config) + count_permanent_checkpoints(run.config)
    text = (
        f"{one / GIB:.1f} GiB each, every {run.config.checkpoint.every_steps:,} steps; up to "
        f"{most * one / GIB:,.1f} GiB at the end of the run"
    )
    yield Finding("checkpoints", text, "checkpoint", one)


def assumptions(run: Run, cluster: Cluster, found: Sequence[Costs]) -> Iterator[Finding]:
    """Yield the assumptions of the costs, which were not measured, and the costs."""
    config, flops = run.config, cluster.flops(run.config)
    whose = "this project's assumption" if cluster.mfu == ASSUMED_MFU else "given by --mfu"
    peak = f"{cluster.mfu:.0%} of {flops / cluster.mfu / 1e12:g} TFLOP/s (MFU; {whose})"
    yield Finding("speed", f"ASSUMED, nothing was measured: {peak}", "flops", flops)
    layer = HOST_SECONDS_A_LAYER
    text = (
        f"ASSUMED: {layer * 1e3:.2g} ms to launch a layer's kernels, "
        f"{layer * config.model.num_hidden_layers * 1e3:.0f} ms a micro-batch, which no step is "
        "shorter than"
    )
    if config.train.compile:
        layer = 0.0
        text = "not counted: train.compile=true launches fewer kernels, how many is not known"
    yield Finding("host", text, "host_seconds", layer)
    stage = config.train.zero_stage
    hidden = f"up to {OVERLAP[stage]:.0%}" if OVERLAP[stage] else "nothing"
    text = (
        f"ASSUMED: {cluster.device.link:g} GB/s between the GPUs of a node, "
        f"{cluster.interconnect:g} GB/s from each to other nodes, of which collectives reach "
        f"{LINK_EFFICIENCY:.0%}; {hidden} of it hides behind computing (ZeRO-{stage})"
    )
    yield Finding("network", text, "interconnect", cluster.interconnect)
    values = [asdict(c) | {"days": c.days, "gpu_hours": c.gpu_hours} for c in found]
    yield Finding("costs", "", "costs", values)


def table(run: Run, device: Device, found: Sequence[Costs]) -> list[str]:
    """Return the lines of a table with a row per number of ranks, and of its legend."""
    marks = (" ", HOST_BOUND) if any(cost.is_host_bound for cost in found) else ("", "")
    rows = [
        {
            "ranks": f"{cost.gpus}",
            "micro": f"{cost.micro_batch_size}",
            "accum.": f"{cost.accumulation_steps}",
            "GiB a rank": f"{cost.memory.total / GIB:.1f}{_mark(device, cost)}",
            "compute s": f"{cost.compute_seconds:.3f}",
            "step s": f"{cost.step_seconds:.3f}{marks[cost.is_host_bound]}",
            "GB sent": f"{cost.communication_bytes / 1e9:.1f}",
            "comm.": f"{cost.exposed_seconds / cost.step_seconds:.1%}",
            "tokens/s": f"{cost.tokens_per_second:,.0f}",
            "days": f"{cost.days:,.2f}",
            "GPU-hours": f"{cost.gpu_hours:,.0f}",
        }
        for cost in found
    ]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    rows = [dict(zip(widths, widths, strict=True)), *rows]
    lines = ["  ".join(row[name].rjust(widths[name]) for name in widths).rstrip() for row in rows]
    return ["", *lines, "", *_legend(run, device, found)]


def _mark(device: Device, cost: Costs) -> str:
    share = cost.memory.total / (device.memory * GIB)
    return " " if share <= TIGHT else "~" if share <= 1 else "!"


def _legend(run: Run, device: Device, found: Sequence[Costs]) -> list[str]:
    train, validation = run.config.train, run.config.validation
    lines = ["comm.: exposed communication's share of a step. Days without failures and queues."]
    if not validation.max_tokens:
        lines.append("Days without validation, whose tokens are those of the data.")
    marks = {_mark(device, cost): cost.memory.advice for cost in reversed(found)}
    if "~" in marks:
        lines.append(f"~ above {TIGHT:.0%} of the device's {device.memory:g} GiB: tight")
    if "!" in marks:
        lines.append(f"! more than the device's {device.memory:g} GiB; {marks['!']}")
    if any(cost.is_host_bound for cost in found):
        lines.append(
            f"{HOST_BOUND} the GPU waits for its host, which launches kernels one by one: fewer "
            "ranks, larger micro-batches"
        )
    is_auto = train.micro_batch_size == "auto"
    if not is_auto and any(cost.micro_batch_size != train.micro_batch_size for cost in found):
        lines.append(
            f"micro: where it is not {train.micro_batch_size}, train.py needs "
            "train.micro_batch_size set to it"
        )
    parts, batch = train.sequence_parallel, train.global_batch_size
    owner = "each" if parts == 1 else f"for {parts} together (train.sequence_parallel)"
    most = f"at most {batch * parts:,} ranks, with a sequence {owner}"
    if not is_auto:
        most += f"; {batch // train.micro_batch_size * parts:,} with "
        most += f"train.micro_batch_size={train.micro_batch_size}"
    lines.append(most)
    return lines
