"""Run one micro-batch of the largest shape forward and backward, without changing the model."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.counts import count_parameters
from cat_lm.data.loader import TrainLoader
from cat_lm.training.checkpoint.optimizer_state import stepped_tensors
from cat_lm.training.engine import Engine
from cat_lm.training.estimate import memory_per_rank
from cat_lm.training.watchdog import host_name

# DeepSpeed's counters that a step changes, even if it is skipped.
_COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
_COUNTERS += ("_is_gradient_accumulation_boundary",)


def dry_run_batch(engine: Engine, loader: TrainLoader) -> str:
    """Compute one micro-batch of full context, drop its gradients, and return a line for the log.

    The loss is made NaN before the backward pass, so that the step is skipped like any other that
    is not finite. Weights, buffers, optimizer, generators and counters do not change, bit for bit.
    It is a collective. Raises UserError, on the affected rank only, if the memory does not suffice,
    or an operator has no deterministic form for train.deterministic.
    """
    config, ranks = engine.config, engine.ranks
    rows = config.train.micro_batch_size
    share = ranks.share(config.train.sequence_parallel)
    batch = {k: v[:rows] for k, v in loader.batch(0, *share).items()}
    parameters = count_parameters(engine.model)
    vocab_size = engine.model.config.vocab_size
    on_gpu = ranks.device.type == "cuda"
    estimate = memory_per_rank(config, parameters, ranks.world_size, vocab_size, on_gpu)
    start = time.perf_counter()
    try:
        with _restoring_state(engine):
            attention = _run_skipped_step(engine, batch)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if operator := refused_operator(error):
            raise UserError(
                f"train.deterministic={config.train.deterministic}: torch's {operator} gives other "
                "bits each time and has no form that does not; set it to false, or choose a model "
                "without it"
            ) from error
        if not _is_out_of_memory(error):
            raise
        raise UserError(
            f"preflight: {host_name()} rank {ranks.rank}: a micro-batch of {rows} x "
            f"{config.data.context_length} tokens does not fit into the memory of the "
            f"{ranks.device.type} (the estimate was {estimate.total / GIB:.2f} GiB: {estimate}); "
            f"{estimate.advice}"
        ) from error
    return (
        f"preflight: dry-run batch of {rows} x {config.data.context_length} tokens in "
        f"{time.perf_counter() - start:.2f} s; estimated memory {estimate.total / GIB:.2f} GiB a "
        f"rank, {_format_peak_memory(ranks.device)}; attention: {attention}"
    )


def _run_skipped_step(engine: Engine, batch: dict) -> str:
    """Compute a step with a NaN loss; return the names of the attention kernels."""
    deepspeed = engine.deepspeed
    moments = allocate_moments(engine)
    (micro_batch,) = engine._micro_batches(batch)
    # One micro-batch is the whole step, so that gradients are reduced and then dropped.
    deepspeed.set_gradient_accumulation_boundary(True)
    one = torch.ones((), device=engine.ranks.device)
    loss = engine._training_loss(engine._forward(micro_batch, num_items_in_batch=one))
    attention = attention_kernels(loss)
    deepspeed.backward(loss * math.nan)
    if engine.config.train.zero_stage == 0:
        engine._clip_gradients()
    moments.clear()  # Even a skipped step allocates the moments.
    deepspeed.step()
    return attention


def allocate_moments(engine: Engine) -> list[torch.Tensor]:
    """Return tensors as large as the moments that the optimizer allocates in its first step.

    Every later batch must fit into memory together with the moments.
    """
    state = engine.optimizer.state
    absent = [(t, kinds) for t, kinds in stepped_tensors(engine) if not state.get(t)]
    return [torch.empty_like(tensor) for tensor, kinds in absent for _ in kinds]


@contextmanager
def _restoring_state(engine: Engine) -> Iterator[None]:
    """Restore buffers, generators and DeepSpeed's counters at the end of the block."""
    deepspeed, device = engine.deepspeed, engine.ranks.device
    held = [(m._buffers, *item) for m in engine.model.modules() for item in m._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in held]
    counters = {name: getattr(deepspeed, name) for name in _COUNTERS}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for (buffers, name, buffer), value in zip(held, values, strict=True):
            buffers[name] = None if buffer is None else buffer.copy_(value)
        for name, value in counters.items():
            setattr(deepspeed, name, value)


def refused_operator(error: BaseException) -> str | None:
    """Return the operator that torch refused for lack of a deterministic form, or None."""
    name, refused, _ = str(error).partition(" does not have a deterministic implementation")
    return name.split()[-1] if refused else None


def attention_kernels(loss: torch.Tensor) -> str:
    """Return the names of the attention kernels in the autograd graph of `loss`.

    torch chooses a kernel for every call, by device, dtype, mask and shape.
    """
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().split("::")[-1]
        if "Compiled" in name:
            found.add("inside the compiled graph")
        elif "cpu_causal_attention" in name:
            found.add("C++ causal attention")
        elif "Attention" in name or "Attn" in name:
            found.add(name.partition("Backward")[0])
        ahead += [following for following, _ in node.next_functions]
    return ", ".join(sorted(found)) or "no fused kernel"


def _is_out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(w in str(error).lower() for w in words)


def _format_peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"allocated on rank 0 {torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB"
    # On Linux, ru_maxrss is the peak resident size of the process in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"rank 0's process {peak:.2f} GiB with its libraries"
