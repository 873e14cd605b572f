"""Costs in words: a line each for one number of ranks, a table for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from cat_lm.config import RunConfig
from cat_lm.core.host import GIB
from launch.doctor.costs import (
    ASSUMED_MFU,
    HOST_SECONDS_A_LAYER,
    LINK_EFFICIENCY,
    OVERLAP,
    Cluster,
    Costs,
    Run,
)
from launch.doctor.findings import Finding

# Above this share of a device's memory a run may not fit: the estimate is no closer.
TIGHT = 0.85
HOST_BOUND = "*"


def assumptions(
    config: RunConfig, cluster: Cluster, mfu: float, found: Sequence[Costs]
) -> Iterator[Finding]:
    """Yield what the costs take for granted, of which nothing was measured; then the costs."""
    peak = cluster.flops / mfu / 1e12
    whose = "this project's assumption" if mfu == ASSUMED_MFU else "given by --mfu"
    text = f"ASSUMED, nothing was measured: {mfu:.0%} of {peak:g} TFLOP/s (MFU; {whose})"
    yield Finding("speed", text, "flops", cluster.flops)
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


def cost_lines(cost: Costs) -> Iterator[Finding]:
    """Yield a step's parts and what the whole run costs."""
    busy = f"computing {cost.compute_seconds:.3f} s"
    if cost.is_host_bound:
        busy = (
            f"launching {cost.host_seconds:.3f} s (the GPU computes {cost.compute_seconds:.3f} s "
            "of them)"
        )
    text = (
        f"{cost.step_seconds:.3f} s: {busy}, exposed communication {cost.exposed_seconds:.3f} s "
        f"({cost.exposed_seconds / cost.step_seconds:.1%}; "
        f"{cost.communication_bytes / 1e9:.1f} GB sent by each GPU); "
        f"{cost.tokens_per_second:,.0f} tokens/s"
    )
    yield Finding("step", text, "step_seconds", cost.step_seconds)
    extra = cost.checkpoints * cost.checkpoint_seconds + cost.validation_seconds
    text = (
        f"{cost.days:.2f} days, {cost.gpu_hours:,.0f} GPU-hours ({extra / cost.total_seconds:.1%} "
        "of it checkpoints and validation; without failures)"
    )
    yield Finding("whole run", text, "gpu_hours", cost.gpu_hours)


def table(run: Run, cluster: Cluster, found: Sequence[Costs]) -> list[str]:
    """Return a row for each number of ranks, and what its marks mean."""
    rows = [["ranks", "micro", "accum.", "GiB a rank", "step s", "comm.", "tokens/s", "days"]]
    rows[0].append("GPU-hours")
    marks = (" ", HOST_BOUND) if any(cost.is_host_bound for cost in found) else ("", "")
    for cost in found:
        rows.append(
            [
                f"{cost.gpus}",
                f"{cost.micro_batch_size}",
                f"{cost.accumulation_steps}",
                f"{cost.memory.total / GIB:.1f}{_mark(cluster, cost)}",
                f"{cost.step_seconds:.3f}{marks[cost.is_host_bound]}",
                f"{cost.exposed_seconds / cost.step_seconds:.1%}",
                f"{cost.tokens_per_second:,.0f}",
                f"{cost.days:,.2f}",
                f"{cost.gpu_hours:,.0f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return ["", *map(str.rstrip, lines), "", *_remarks(run, cluster, found)]


def _mark(cluster: Cluster, cost: Costs) -> str:
    share = cost.memory.total / (cluster.device.memory * GIB)
    return " " if share <= TIGHT else "~" if share <= 1 else "!"


def _remarks(run: Run, cluster: Cluster, found: Sequence[Costs]) -> list[str]:
    train, validation = run.config.train, run.config.validation
    lines = ["comm.: exposed communication's share of a step. Days without failures and queues."]
    if not validation.max_tokens:
        lines.append("Days without validation, whose tokens are those of the data.")
    marks = {_mark(cluster, cost) for cost in found}
    memory = f"the device's {cluster.device.memory:g} GiB"
    if "~" in marks:
        lines.append(f"~ above {TIGHT:.0%} of {memory}: tight")
    if "!" in marks:
        advice = next(c.memory.advice for c in found if _mark(cluster, c) == "!")
        lines.append(f"! more than {memory}; {advice}")
    if any(cost.is_host_bound for cost in found):
        lines.append(
            f"{HOST_BOUND} the GPU waits for its host, which launches kernels one by one: fewer "
            "ranks, larger micro-batches"
        )
    if any(cost.micro_batch_size != train.micro_batch_size for cost in found):
        lines.append(
            f"micro: where it is not {train.micro_batch_size}, train.py needs "
            "train.micro_batch_size set to it"
        )
    parts, batch = train.sequence_parallel, train.global_batch_size
    owner = "each" if parts == 1 else f"for {parts} together (train.sequence_parallel)"
    lines.append(
        f"at most {batch * parts:,} ranks, with a sequence {owner}; "
        f"{batch // train.micro_batch_size * parts:,} with "
        f"train.micro_batch_size={train.micro_batch_size}"
    )
    return lines
