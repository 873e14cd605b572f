"""Quantities derived from the configuration: parameters, FLOPs, memory, a device's peak.

The one definition of each; log, benchmarks and planning use these.
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
from cat_lm.training.building import begins_again_in_fp32, build_model, trained_config
from cat_lm.training.devices import known_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a rank really took was within this factor of the estimate in the runs on CPUs that
# tests/distributed/test_memory.py makes, of all families. `memory_per_rank` says where it is not.
MEMORY_ACCURACY = 1.1
# Above this share of a device's free memory a run may not fit: allocators leave gaps, too.
TIGHT = 0.85
# DeepSpeed's default of how many gathered weights ZeRO-3 keeps (stage3_max_live_parameters).
_LIVE_PARAMETERS = 10**9
# The largest micro-batch of train.micro_batch_size=auto on a CPU.
_MOST_ON_CPU = 8
_LAST_RESORT = "take a smaller model or a larger device"


def num_parameters(config: RunConfig, vocab_size: int) -> int:
    """Count a run's parameters without its model; raises as `meta_model`."""
    return count_parameters(meta_model(config, vocab_size))


def lookup_parameters(model: PreTrainedModel) -> int:
    """Count the input embedding where it multiplies nothing: untied from the head."""
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    return 0 if is_tied else getattr(embedding, "ds_numel", embedding.numel())


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Count a token's operations in a step, see `cat_lm.counts`."""
    return counts.flops_per_token(meta_model(config, vocab_size), config.data.context_length)


def peak_flops(config: RunConfig, device: torch.device) -> float | None:
    """Return a device's peak FLOP/s: `train.peak_tflops`, else by its name in bf16, else None."""
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops * 1e12
    return device_peak_flops(device) if config.train.precision == "bf16" else None


def device_peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a GPU by its name; None for others, and for a CPU."""
    if device.type != "cuda":
        return None
    found = known_device(torch.cuda.get_device_name(device))
    return found.tflops * 1e12 if found else None


def meta_model(config: RunConfig, vocab_size: int) -> PreTrainedModel:
    """Build the configuration's model without its weights (on the meta device).

    For counting, so it does not matter whether the attention that it asks for is installed.
    `model.vocab_size` comes before the tokenizer's. Raises UserError where it cannot be built.
    """
    section = config.model.portable()
    # Layers that are computed again keep nothing, and no backend but the usual is sure to be here.
    plain = {"activation_checkpointing": False, "conv_backend": "auto", "mixer_backend": "auto"}
    train = config.train.model_copy(update=plain)
    config = config.model_copy(update={"model": section, "train": train})
    # Building draws from the generator, which is the run's.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(config, vocab_size)


def building_bytes(config: RunConfig, parameters: int) -> int:
    """Return the bytes of the whole model in fp32, which the first rank builds, and of a copy.

    There is one where the run `begins_again_in_fp32`.
    """
    return (8 if begins_again_in_fp32(config) else 4) * parameters


def checkpoint_bytes(config: RunConfig, parameters: int) -> int:
    """Return the bytes of a checkpoint: weights in fp32, AdamW's moments, an average if kept.

    Of Muon, whose state is smaller, a checkpoint takes less.
    """
    return (12 if config.train.ema_decay is None else 16) * parameters


def state_tensors(config: RunConfig, vocab_size: int) -> float:
    """Return how many numbers the optimizer keeps of a parameter, on average: 2 of AdamW."""
    return _state_tensors(config.model_dump_json(), vocab_size)


@functools.cache
def _state_tensors(text: str, vocab_size: int) -> float:
    config = RunConfig.model_validate_json(text)
    kind, _ = optimizers.chosen(config.optimizer)
    model = meta_model(config, vocab_size)
    kinds = kind.state_kinds(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(len(kinds[name]) * size for name, size in sizes.items()) / sum(sizes.values())


def saves(config: RunConfig) -> int:
    """Return the checkpoints of a run that nothing stops: one every so many steps, and the last."""
    return math.ceil(config.total_steps / config.checkpoint.every_steps)


def checkpoints_to_hold(config: RunConfig, saved: int = 0) -> int:
    """Return the checkpoints that still need disk at the same time, at least the next one.

    One more than `checkpoint.keep_last`, where so many are made: an old one is deleted after a
    save, never before. Complete ones that are `saved` already need no more.
    """
    return max(1, min(config.checkpoint.keep_last + 1, saves(config)) - saved)


def kept_for_good(config: RunConfig) -> int:
    """Return how many checkpoints `checkpoint.keep_every_steps` has kept by the end, at most."""
    every = config.checkpoint.keep_every_steps
    return config.total_steps // every if every else 0


def check_disk(config: RunConfig, parameters: int, free: int, saved: int) -> tuple[str | None, str]:
    """Compare the free bytes of a run's folder, which holds `saved` checkpoints, with its needs.

    Returns what is wrong, or None, and a line about the room.
    """
    one, problem = checkpoint_bytes(config, parameters), None
    needed = checkpoints_to_hold(config, saved) * one
    if free < needed:
        problem = (
            f"train.output_dir={config.train.output_dir}: {size(free)} are free, but checkpoints "
            f"of {size(one)} each need {size(needed)}"
        )
    text = f"{size(free)} free, a checkpoint takes {size(one)}"
    if kept := kept_for_good(config):
        text += (
            f"; checkpoint.keep_every_steps={config.checkpoint.keep_every_steps} keeps up to "
            f"{kept:,} for good, {size(kept * one)} by the end"
        )
    return problem, text


def size(bytes_: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:.1f} {name}"
    return f"{bytes_ / 1024:.1f} KiB"


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank's part of a run takes on its device, at the peak of a step or its start.

    `buffers` are gathered or cast weights, and the buckets that gradients are reduced in, as far as
    they stand beside the activations or exceed them after those are gone; or the weights that
    ZeRO-3 begins with.
    """

    weights: float  # these three as DeepSpeed keeps them from step to step
    gradients: float
    optimizer: float
    activations: float  # of a micro-batch's backward pass, with the loss's own chunk
    buffers: float
    advice: str  # which keys lower it

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
    """Estimate what a rank needs; precision must be decided.

    What autograd keeps is measured (`saved_bytes`), and what DeepSpeed keeps is counted, but not
    what passes lay beside them for a moment: to within `MEMORY_ACCURACY` for models like those of
    `tests/distributed/test_memory.py`. Recurrences keep what this project's own operators do.
    Multi-token attention counts a document a row; documents of a few tokens each, of which every
    one has c_q - 1 rows more, take up to three times as much. On a CPU only memory that is written
    to counts; a GPU's buckets are reserved whole.
    """
    train = config.train
    stage, bf16 = train.zero_stage, train.precision == "bf16"
    rows = train.micro_batch_size * world_size / train.sequence_parallel
    held = train.global_batch_size > rows  # gradients of earlier passes
    compute = 2.0 if bf16 else 4.0
    whole, state = 1 / world_size, 4.0 * state_tensors(config, vocab_size)
    if stage == 0:
        weights, gradients, optimizer = 4.0, 4.0, state
        beside = 0.0  # autocast's copies of the weights are kept for the backward pass
    else:
        weights = compute * (whole if stage == 3 else 1)
        gradients, optimizer = 4.0 * (whole if stage >= 2 else 1), (4.0 + state) * whole
        beside = compute * min(parameters, _LIVE_PARAMETERS) if stage == 3 else 0.0
    if train.ema_decay is not None:
        optimizer += 4.0 * whole
    # The bucket's copy of the gradients, and the one in fp32 that is sent.
    buckets = stage >= 2 or (stage == 1 and not bf16)
    bucket_size = compute if buckets else 0.0
    # ZeRO-2 fills one bucket while the other is being reduced.
    reserved = bucket_size * GRADIENT_BUCKET * (2 if stage == 2 else 1) if on_gpu else 0.0
    in_bucket = min(parameters, GRADIENT_BUCKET)
    sent = in_bucket * (4.0 + (0.0 if on_gpu else bucket_size))
    if stage == 3 and world_size > 1:  # it holds both while the activations are there
        beside += in_bucket * ((4.0 if bf16 else 0.0) + (0.0 if on_gpu else bucket_size))
    if stage <= 1 and world_size == 1 and not buckets:
        sent = 0.0
    elif stage == 1 and bf16:  # in place, or in a copy in bf16
        sent = 2.0 * parameters if train.gradient_communication == "bf16" else 0.0
    saved = saved_bytes(config, vocab_size, on_gpu)
    kept = saved.streams + saved.largest if train.activation_checkpointing else saved.layers
    activations = saved.rest + kept
    activations += _logits(config, config.model.vocab_size or vocab_size, on_gpu)
    # Gradients of earlier passes, and the sums that ZeRO-1 in bf16 always has, lie beside the
    # activations; else they come as those go.
    absent = 0.0 if held or (stage == 1 and bf16) else gradients * parameters
    peak = reserved + max(activations + beside - absent, sent)
    advice = _memory_advice(config, world_size)
    # ZeRO-3 begins with all weights on every rank, before it partitions them.
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
    """Return the divisors of a rank's share of the global batch; none if the ranks do not share it.

    Ranks that have each sequence together (`train.sequence_parallel`) are one.
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
    """Return what train.micro_batch_size=auto is where `free` bytes are there for a rank.

    The largest divisor of the rank's share whose estimate is at most `TIGHT` of that; on a CPU,
    whose memory other programs share, at most 8. Where none fits it is 1, of which the check of
    memory then says what is wrong. Precision must be decided.
    """
    sizes = micro_batch_sizes(config, world_size)
    sizes = [size for size in sizes if on_gpu or size <= _MOST_ON_CPU]

    def needed(size: int) -> float:
        given = config.with_micro_batch(size), parameters, world_size, vocab_size, on_gpu
        return memory_per_rank(*given).total

    # From the largest: the one without accumulation may need less than a smaller one.
    return next((size for size in reversed(sizes) if needed(size) <= TIGHT * free), 1)


def saved_bytes(config: RunConfig, vocab_size: int, on_gpu: bool) -> counts.Saved:
    """Measure what the backward pass of a micro-batch finds kept; precision must be decided."""
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
    if config.objective.section:  # what is taught attends in another way
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


def _logits(config: RunConfig, vocab_size: int, on_gpu: bool) -> float:
    """Return the bytes of a chunk of logits; on a CPU in fp32, with their exponentials."""
    tokens = config.train.micro_batch_size * config.data.context_length
    tokens //= config.train.sequence_parallel
    if not on_gpu:
        return 8 * min(CHUNK_ELEMENTS, tokens * vocab_size)
    itemsize = 2 if config.train.precision == "bf16" else 4
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
