"""The output of `launch.plan`: a screen for one number of GPUs, a table for several."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cat_lm.host import GIB
from launch.plan.costs import LINK_EFFICIENCY, OVERLAP, Cluster, Costs, Run, Speed

WIDTH = 100
LABEL = 13
# Above this share of a device's memory a run may not fit: the estimate is no closer.
TIGHT = 0.85
HOST_BOUND = "*"


def render(
    run: Run, cluster: Cluster, found: Sequence[Costs], speed: Speed, price: float | None
) -> str:
    """All lines. One number of GPUs gets the parts of its step, several a row each."""
    lines = [*_about(run, found), *_labelled("speed", *speed.sources)]
    lines += _labelled("host", _host(run, speed))
    lines += _labelled("network", _network(cluster, run.config.train.zero_stage))
    if len(found) == 1:
        lines += _details(run, cluster, found[0], price)
    else:
        lines += ["", *_table(cluster, found, price), *_remarks(run, cluster, found)]
    return "\n".join(line.rstrip() for line in lines)


def _about(run: Run, found: Sequence[Costs]) -> list[str]:
    config, batch = run.config, run.config.train.global_batch_size
    parts = config.train.sequence_parallel
    owner = "each" if parts == 1 else f"for {parts} together (train.sequence_parallel)"
    tokens = config.total_steps * config.tokens_per_step
    validated = "" if config.validation.max_tokens else "; validation is not counted"
    return [
        *_labelled(
            "model",
            f"{config.model.architecture} ({config.architecture.words(config.model)}), "
            f"{run.parameters:,} parameters, {run.flops_per_token / 1e9:.2f} GFLOPs a token "
            f"(forward and backward), {config.train.precision}, ZeRO-{config.train.zero_stage}"
            + (", activation checkpointing" if config.train.activation_checkpointing else ""),
        ),
        *_labelled(
            "run",
            f"{tokens / 1e9:,.1f}B tokens: {config.total_steps:,} steps of "
            f"{config.tokens_per_step:,} ({batch:,} sequences of {config.data.context_length:,}), "
            f"{config.steps_of('warmup'):,} of them warm-up; "
            f"{tokens * run.flops_per_token:.3g} FLOPs",
        ),
        *_labelled(
            "at most",
            f"{batch * parts:,} GPUs, with a sequence {owner}; "
            f"{batch // config.train.micro_batch_size * parts:,} "
            f"with train.micro_batch_size={config.train.micro_batch_size}",
        ),
        *_labelled(
            "checkpoint",
            f"{found[0].checkpoint_bytes / GIB:.1f} GiB in {found[0].checkpoint_seconds:.0f} s, "
            f"{found[0].checkpoints:,} times{validated}",
        ),
    ]


def _host(run: Run, speed: Speed) -> str:
    if not speed.host_seconds:
        return "not counted: train.compile=true launches fewer kernels, how many is not known"
    layers = run.config.model.num_hidden_layers
    what = (
        f"{speed.host_seconds * 1e3:.2g} ms to launch a layer's kernels, "
        f"{speed.host_seconds * layers * 1e3:.0f} ms a micro-batch, which no step is shorter than"
    )
    if speed.is_host_measured:
        return f"at most {what}: the measured step took no longer"
    return f"ASSUMED: {what} (a measured step that is shorter lowers it)"


def _network(cluster: Cluster, stage: int) -> str:
    within = (
        f"ASSUMED: {cluster.device.link:g} GB/s between the GPUs of a node, "
        f"{cluster.interconnect:g} GB/s from each to other nodes, of which collectives reach "
        f"{LINK_EFFICIENCY:.0%}; "
    )
    hidden = f"up to {OVERLAP[stage]:.0%}" if OVERLAP[stage] else "nothing"
    return within + f"{hidden} of it hides behind computing (ZeRO-{stage})"


def _details(run: Run, cluster: Cluster, cost: Costs, price: float | None) -> list[str]:
    exposed = cost.exposed_seconds / cost.step_seconds
    extra = cost.checkpoints * cost.checkpoint_seconds + cost.validation_seconds
    total = (
        f"{cost.days:.2f} days, {cost.gpu_hours:,.0f} GPU-hours"
        f" ({extra / cost.total_seconds:.1%} of it checkpoints and validation; without failures)"
    )
    if price:
        total += f"; {price * cost.gpu_hours:,.0f} at {price:g} a GPU-hour"
    nodes = f"{cost.nodes} node{'s' if cost.nodes > 1 else ''}"
    return [
        *_labelled("device", f"{cost.gpus} {cluster.device.name} in {nodes}"),
        *_labelled("batch", _batch(run, cost)),
        *_labelled("memory", f"{_fit(cluster, cost)}: {cost.memory} GiB"),
        *_labelled(
            "step",
            f"{cost.step_seconds:.3f} s: {_busy(cost)}, exposed "
            f"communication {cost.exposed_seconds:.3f} s ({exposed:.1%}; "
            f"{cost.communication_bytes / 1e9:.1f} GB sent by each GPU)",
        ),
        *_labelled("throughput", f"{cost.tokens_per_second:,.0f} tokens/s"),
        *_labelled("whole run", total),
    ]


def _busy(cost: Costs) -> str:
    if cost.is_host_bound:
        return (
            f"launching {cost.host_seconds:.3f} s (the GPU computes {cost.compute_seconds:.3f} s "
            "of them)"
        )
    return f"computing {cost.compute_seconds:.3f} s"


def _batch(run: Run, cost: Costs) -> str:
    share = run.config.train.global_batch_size // run.config.row_shares(cost.gpus)
    passes, parts = cost.accumulation_steps, run.config.train.sequence_parallel
    owner = "a GPU" if parts == 1 else f"for {parts} GPUs"
    text = (
        f"{share} sequence{'s' if share > 1 else ''} {owner} and step: {cost.micro_batch_size} at "
        f"once, {passes} micro-batch{'es' if passes > 1 else ''}"
    )
    asked = run.config.train.micro_batch_size
    if cost.micro_batch_size != asked:
        text += f" (train.py needs train.micro_batch_size={cost.micro_batch_size}, not {asked})"
    return text


def _fit(cluster: Cluster, cost: Costs) -> str:
    needed, there = cost.memory.total / GIB, cluster.device.memory
    verdict = "fits" if needed <= TIGHT * there else "tight" if needed <= there else "TOO MUCH"
    return f"{verdict}, about {needed:.1f} of {there:g} GiB a GPU"


def _table(cluster: Cluster, found: Sequence[Costs], price: float | None) -> list[str]:
    heads = ["GPUs", "micro", "accum.", "GiB a GPU", "step s", "comm.", "tokens/s", "days"]
    heads += ["GPU-hours", *(["price"] if price else [])]
    rows = [heads]
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
                *([f"{price * cost.gpu_hours:,.0f}"] if price else []),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def _mark(cluster: Cluster, cost: Costs) -> str:
    verdict = _fit(cluster, cost).split(",")[0]
    return {"fits": " ", "tight": "~", "TOO MUCH": "!"}[verdict]


def _remarks(run: Run, cluster: Cluster, found: Sequence[Costs]) -> list[str]:
    lines = [
        "",
        "comm.: exposed communication's share of a step. Days without failures and queues.",
    ]
    marks = {_mark(cluster, cost) for cost in found}
    if "~" in marks:
        lines.append(f"~ above {TIGHT:.0%} of the device's {cluster.device.memory:g} GiB: tight")
    if "!" in marks:
        advice = next(c.memory.advice for c in found if _mark(cluster, c) == "!")
        lines.append(f"! more than the device's {cluster.device.memory:g} GiB; {advice}")
    if any(cost.is_host_bound for cost in found):
        lines.append(
            f"{HOST_BOUND} the GPU waits for its host, which launches kernels one by one: fewer "
            "GPUs, larger micro-batches"
        )
    asked = run.config.train.micro_batch_size
    if any(cost.micro_batch_size != asked for cost in found):
        lines.append(
            f"micro: where it is not {asked}, train.py needs train.micro_batch_size set to it"
        )
    return lines


def _labelled(label: str, *paragraphs: str) -> list[str]:
    lines = []
    for number, paragraph in enumerate(paragraphs):
        lines += textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=(label if number == 0 else "").ljust(LABEL),
            subsequent_indent=" " * LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
