"""Estimates from the configuration: parameters, FLOPs, memory, disk, and a device's peak FLOP/s.

The log, the benchmarks and the planning commands all use these functions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cat_lm import counts, optimizers
from cat_lm.config import RunConfig
from cat_lm.config.run import GRADIENT_BUCKET
from cat_lm.core.host import GIB
from cat_lm.counts import count_parameters
from cat_lm.model.attention.masks import document_attention
from cat_lm.ops.loss.linear_cross_entropy import CHUNK_ELEMENTS, kernel_chunk
from cat_lm.training.building import build_model, needs_exact_masters, trained_config
from cat_lm.training.devices import known_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A rank's measured memory is within this factor of the estimate in the runs of all families by
# tests/distributed/test_memory.py, on CPUs. `memory_per_rank` describes the exceptions.
MEMORY_ACCURACY = 1.1
# Above this share of a device's free memory a run may not fit: allocators leave gaps, too.
TIGHT = 0.85
# The number of gathered weights that ZeRO-3 keeps (DeepSpeed's stage3_max_live_parameters).
_LIVE_PARAMETERS = 10**9
# The largest micro-batch of train.micro_batch_size=auto on a CPU.
_MOST_ON_CPU = 8
_LAST_RESORT = "take a smaller model or a larger device"


def num_parameters(config: RunConfig, vocab_size: int) -> int:
    """Return the number of parameters of a run's model; raises as `meta_model` does."""
    return count_parameters(meta_model(config, vocab_size))


def lookup_parameters(model: PreTrainedModel) -> int:
    """Return the size of the input embedding, which costs no FLOPs; 0 if it is tied to the head."""
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    return 0 if is_tied else getattr(embedding, "ds_numel", embedding.numel())


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Return the FLOPs of a training step per token, as `cat_lm.counts` defines them."""
    return counts.flops_per_token(meta_model(config, vocab_size), config.data.context_length)


def peak_flops(config: RunConfig, device: torch.device) -> float | None:
    """Return a device's peak FLOP/s: `train.peak_tflops`, or by its name in bf16, or None."""
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops * 1e12
    return device_peak_flops(device) if config.train.precision == "bf16" else None


def device_peak_flops(device: torch.device) -> float | None:
    """Return a GPU's peak FLOP/s in bf16 by its name; None for unknown GPUs and for a CPU."""
    if device.type != "cuda":
        return None
    found = known_device(torch.cuda.get_device_name(device))
    return found.tflops * 1e12 if found else None


def meta_model(config: RunConfig, vocab_size: int) -> PreTrainedModel:
    """Build the configuration's model on the meta device, for counting.

    The configured attention implementation need not be installed. `model.vocab_size` has priority
    over `vocab_size`, the tokenizer's. Raises UserError if the model cannot be built.
    """
    section = config.model.with_portable_attention()
    # Recomputed layers would hide what they save, and other backends may not be installed.
    plain = {"activation_checkpointing": False, "conv_backend": "auto", "mixer_backend": "auto"}
    train = config.train.model_copy(update=plain)
    config = config.model_copy(update={"model": section, "train": train})
    # Building a model draws random numbers, which must not change those of the run.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(config, vocab_size)


def building_bytes(config: RunConfig, parameters: int) -> int:
    """Return the bytes that rank 0 needs to build the model in fp32.

    It keeps a second copy if the run `needs_exact_masters`.
    """
    return (8 if needs_exact_masters(config) else 4) * parameters


def checkpoint_bytes(config: RunConfig, parameters: int) -> int:
    """Return the bytes of a checkpoint: fp32 weights, AdamW's moments, averaged weights.

    With Muon, whose state is smaller, a checkpoint takes less.
    """
    return (12 if config.train.ema_decay is None else 16) * parameters


def state_tensors(config: RunConfig, vocab_size: int) -> float:
    """Return how many numbers the optimizer keeps per parameter, on average: 2 for AdamW."""
    return _state_tensors(config.model_dump_json(), vocab_size)


@functools.cache
def _state_tensors(text: str, vocab_size: int) -> float:
    config = RunConfig.model_validate_json(text)
    kind, _ = optimizers.chosen(config.optimizer)
    model = meta_model(config, vocab_size)
    kinds = kind.state_kinds(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(len(kinds[name]) * size for name, size in sizes.items()) / sum(sizes.values())


def count_saves(config: RunConfig) -> int:
    """Return the number of checkpoints of an uninterrupted run, including the last step's."""
    return math.ceil(config.total_steps / config.checkpoint.every_steps)


def count_stored_checkpoints(config: RunConfig, saved: int = 0) -> int:
    """Return the number of checkpoints that still need disk space at the same time, at least 1.

    It is up to `checkpoint.keep_last` + 1, because an old checkpoint is deleted only after the next
    save, minus the number of complete checkpoints that are `saved` already.
    """
    return max(1, min(config.checkpoint.keep_last + 1, count_saves(config)) - saved)


def count_permanent_checkpoints(config: RunConfig) -> int:
    """Return the number of checkpoints that `checkpoint.keep_every_steps` keeps by the end."""
    every = config.checkpoint.keep_every_steps
    return config.total_steps // every if every else 0


def check_disk(config: RunConfig, parameters: int, free: int, saved: int) -> tuple[str | None, str]:
    """Compare the free bytes in a run's folder, which has `saved` checkpoints, with what is needed.

    Return (the problem or None, a line for the log about the space).
    """
    one, problem = checkpoint_bytes(config, parameters), None
    needed = count_stored_checkpoints(config, saved) * one
    if free < needed:
        problem = (
            f"train.output_dir={config.train.output_dir}: {size(free)} are free, but checkpoints "
            f"of {size(one)} each need {size(needed)}"
        )
    text = f"{size(free)} free, a checkpoint takes {size(one)}"
    if kept := count_permanent_checkpoints(config):
        text += (
            f"; checkpoint.keep_every_steps={config.checkpoint.keep_every_steps} keeps up to "
            f"{kept:,} for good, {size(kept * one)} by the end"
        )
    return problem, text


def size(bytes_: float) -> str:
    """Return a number of bytes as text, such as 1.5 GiB."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:.1f} {name}"
    return f"{bytes_ / 1024:.1f} KiB"


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs on its device, at the peak of a step or at the start.

    `buffers` are gathered or cast weights and the buckets in which gradients are reduced, as far as
    they raise the peak above states and activations; or the whole weights that ZeRO-3 starts with.
    """

    weights: float  # These three are what DeepSpeed keeps from step to step.
    gradients: float
    optimizer: float
    activations: float  # tensors saved by a micro-batch, and the loss's chunk of logits
    buffers: float
    advice: str  # the keys that lower the memory

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.buffers

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "buffers")
        return ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in names)


def memory_per_rank(
    config: RunConfig, parameters: int, world_size: int, vocab_size: int, on_gpu: bool = True
) -> Memory:
    """Estimate the memory of a rank; `train.precision` must not be `auto`.

    Tensors that autograd count_saves are measured (`saved_bytes`), and DeepSpeed's are counted.
    Temporary tensors within an operator are not, so that the estimate is accurate to
    `MEMORY_ACCURACY` for models like those of `tests/distributed/test_memory.py`. Recurrences are
    counted as this project's operators compute them. Multi-token attention is counted with one
    document per sequence; documents of a few tokens each, every one with c_q - 1 more queries, take
    up to three times as much. On a CPU only memory that is written to counts; a GPU reserves whole
    buckets.
    """
    train = config.train
    stage, bf16 = train.zero_stage, train.precision == "bf16"
    rows = train.micro_batch_size * world_size / train.sequence_parallel
    held = train.global_batch_size > rows  # Gradients of earlier micro-batches exist.
    compute = 2.0 if bf16 else 4.0
    whole, state = 1 / world_size, 4.0 * state_tensors(config, vocab_size)
    if stage == 0:
        weights, gradients, optimizer = 4.0, 4.0, state
        beside = 0.0  # Autocast's copies of the weights are among the saved tensors.
    else:
        weights = compute * (whole if stage == 3 else 1)
        gradients, optimizer = 4.0 * (whole if stage >= 2 else 1), (4.0 + state) * whole
        beside = compute * min(parameters, _LIVE_PARAMETERS) if stage == 3 else 0.0
    if train.ema_decay is not None:
        optimizer += 4.0 * whole
    # Buckets hold a copy of the gradients, and a copy in fp32 is sent.
    buckets = stage >= 2 or (stage == 1 and not bf16)
    bucket_size = compute if buckets else 0.0
    # ZeRO-2 fills one bucket while it reduces the other.
    reserved = bucket_size * GRADIENT_BUCKET * (2 if stage == 2 else 1) if on_gpu else 0.0
    in_bucket = min(parameters, GRADIENT_BUCKET)
    sent = in_bucket * (4.0 + (0.0 if on_gpu else bucket_size))
    if stage == 3 and world_size > 1:  # ZeRO-3 holds both copies together with activations.
        beside += in_bucket * ((4.0 if bf16 else 0.0) + (0.0 if on_gpu else bucket_size))
    if stage <= 1 and world_size == 1 and not buckets:
        sent = 0.0
    elif stage == 1 and bf16:  # Gradients are sent in place, or in a bf16 copy.
        sent = 2.0 * parameters if train.gradient_communication == "bf16" else 0.0
    saved = saved_bytes(config, vocab_size, on_gpu)
    kept = saved.streams + saved.largest if train.activation_checkpointing else saved.layers
    activations = saved.rest + kept
    activations += _logit_bytes(config, config.model.vocab_size or vocab_size, on_gpu)
    # Gradients of earlier micro-batches, and the sums that ZeRO-1 in bf16 always has, exist
    # together with the activations. Otherwise gradients appear while activations are freed.
    absent = 0.0 if held or (stage == 1 and bf16) else gradients * parameters
    peak = reserved + max(activations + beside - absent, sent)
    advice = _memory_advice(config, world_size)
    # ZeRO-3 starts with all weights on every rank, before it partitions them.
    start = (compute - weights - gradients - optimizer) * parameters
    if stage == 3 and start > peak:
        peak, advice = start, _LAST_RESORT
    shown = min(activations, peak)
    return Memory(
        weights * parameters,
        gradients * parameters,
        optimizer * parameters,
        shown,
        peak - shown,
        advice,
    )


def micro_batch_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Return the divisors of a rank's part of the global batch; [] if it cannot be divided.

    Ranks that share each sequence (`train.sequence_parallel`) count as one.
    """
    train = config.train
    batch, rows = train.global_batch_size * train.sequence_parallel, world_size
    if world_size % train.sequence_parallel or batch % rows:
        return []
    share = batch // rows
    return [size for size in range(1, share + 1) if share % size == 0]


def fitting_micro_batch(
    config: RunConfig,
    parameters: int,
    world_size: int,
    vocab_size: int,
    free: float,
    on_gpu: bool = True,
) -> int:
    """Return the value of train.micro_batch_size=auto for a rank with `free` bytes of memory.

    It is the largest divisor of the rank's part whose estimate is at most `TIGHT` times `free`. On
    a CPU, whose memory other programs share, it is at most 8. If none fits it is 1, and the check
    of memory reports the error. `train.precision` must not be `auto`.
    """
    sizes = micro_batch_sizes(config, world_size)
    sizes = [size for size in sizes if on_gpu or size <= _MOST_ON_CPU]

    def needed(size: int) -> float:
        given = config.with_micro_batch(size), parameters, world_size, vocab_size, on_gpu
        return memory_per_rank(*given).total

    # Try the largest first: without accumulation it may need less memory than a smaller one.
    return next((size for size in reversed(sizes) if needed(size) <= TIGHT * free), 1)


def saved_bytes(config: RunConfig, vocab_size: int, on_gpu: bool) -> counts.Saved:
    """Measure the bytes that autograd saves for the backward pass of a micro-batch."""
    return _saved_bytes(config.model_dump_json(), vocab_size, on_gpu)


@functools.cache
def _saved_bytes(text: str, vocab_size: int, on_gpu: bool) -> counts.Saved:
    config = RunConfig.model_validate_json(text)
    train, data = config.train, config.data
    device = torch.device("cuda" if on_gpu else "cpu")
    bf16 = train.precision == "bf16"
    compute = torch.bfloat16 if bf16 else torch.float32
    model = meta_model(config, vocab_size)
    settings = getattr(model.base_model, "layout_settings", model.config)
    if config.objective.section:  # The objective changes how the model attends.
        settings = trained_config(config, vocab_size)
    masks = data.mask_documents and getattr(settings, "attends", False)
    masks = masks and document_attention(settings, device, compute).name == "mask"
    return counts.saved_bytes(
        model,
        train.micro_batch_size,
        data.context_length,
        dtype=torch.float32 if train.zero_stage == 0 else compute,
        autocast=bf16 and train.zero_stage == 0,
        documents=masks,
        parts=train.sequence_parallel,
        on_gpu=on_gpu,
    )


def _logit_bytes(config: RunConfig, vocab_size: int, on_gpu: bool) -> float:
    """Return the bytes of a chunk of logits."""
    tokens = config.train.micro_batch_size * config.data.context_length
    tokens //= config.train.sequence_parallel
    itemsize = 2 if config.train.precision == "bf16" else 4
    if not on_gpu:
        return itemsize * min(CHUNK_ELEMENTS, tokens * vocab_size)
    length, stride = kernel_chunk(tokens, vocab_size, itemsize)
    return itemsize * min(length, tokens) * stride


def _memory_advice(config: RunConfig, world_size: int) -> str:
    train, ways = config.train, []
    if train.micro_batch_size > 1:
        ways.append(f"lower train.micro_batch_size={train.micro_batch_size}")
    if not train.activation_checkpointing:
        ways.append("set train.activation_checkpointing=true")
    if train.zero_stage < 3 and world_size > 1:
        ways.append(f"raise train.zero_stage={train.zero_stage}")
    ways.append(_LAST_RESORT)
    return ", or ".join(ways)
