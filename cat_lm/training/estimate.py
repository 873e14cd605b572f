"""Quantities derived from the configuration: parameters, FLOPs, memory, a device's peak.

The one definition of each; log, benchmarks and planning use these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.config.run import GRADIENT_BUCKET
from cat_lm.core.host import GIB
from cat_lm.ops.loss.linear_cross_entropy import CHUNK_ELEMENTS, kernel_chunk
from cat_lm.training.building import begins_again_in_fp32
from cat_lm.training.devices import known_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# What a rank really took was within this factor of the estimate in 41 runs on CPUs, of all stages
# and both precisions (tests/distributed has some). `memory_per_rank` says for what it is not.
MEMORY_ACCURACY = 1.25
# DeepSpeed's default of how many gathered weights ZeRO-3 keeps (stage3_max_live_parameters).
_LIVE_PARAMETERS = 10**9
_LAST_RESORT = "take a smaller model or a larger device"


def count_parameters(model: torch.nn.Module) -> int:
    """Each parameter once, whole even where ZeRO-3 has partitioned it."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def lookup_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the input embedding where it multiplies nothing: untied from the head."""
    architecture = architectures.of_config(config)
    return architecture.lookup_parameters(architecture.section(config))


def flops_per_token(
    config: PreTrainedConfig, parameters: int, context_length: int, run: RunConfig | None = None
) -> float:
    """Floating-point operations of forward and backward per token.

    6 per parameter that multiplies once (all but the embedding that is only looked up and those
    that belong to no matrix, such as filters), and what mixes positions: see the architecture's
    `mixing_flops`.

    Args:
        run: whose steps are counted; by default those of a model that trains as it is.
    """
    architecture = architectures.of_config(config)
    section = architecture.section(config)
    section = section if run is None else run.as_trained(section)
    return architecture.flops_per_token(section, parameters, context_length)


def peak_flops(config: RunConfig, device: torch.device) -> float | None:
    """Peak FLOP/s of one device: `train.peak_tflops`, else by its name in bf16, else unknown."""
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops * 1e12
    return device_peak_flops(device) if config.train.precision == "bf16" else None


def device_peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a GPU by its name; None for one that is not listed, and for a CPU."""
    if device.type != "cuda":
        return None
    found = known_device(torch.cuda.get_device_name(device))
    return found.tflops * 1e12 if found else None


def meta_model(config: RunConfig, vocab_size: int) -> PreTrainedModel:
    """The configuration's model without its weights (on the meta device), in milliseconds.

    For counting, so it does not matter whether the attention that it asks for is installed.

    Args:
        vocab_size: the tokenizer's; `model.vocab_size` comes before it.

    Raises:
        UserError: the model cannot be built.
    """
    from cat_lm.training.engine import build_model

    section = config.architecture.portable(config.model)
    config = config.model_copy(update={"model": section})
    # Building draws from the generator, which is the run's.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(config, vocab_size)


def building_bytes(config: RunConfig, parameters: int) -> int:
    """Bytes of its host's memory that the first rank takes to build the model: whole, in fp32.

    And a copy, where the run `begins_again_in_fp32`.
    """
    return (8 if begins_again_in_fp32(config) else 4) * parameters


def checkpoint_bytes(parameters: int) -> int:
    """Bytes of a checkpoint: the weights in fp32, stored once, and AdamW's two moments."""
    return 12 * parameters


def saves(config: RunConfig) -> int:
    """Checkpoints of a run that nothing stops: one every so many steps, and one of the last."""
    return math.ceil(config.total_steps / config.checkpoint.every_steps)


def checkpoints_to_hold(config: RunConfig, saved: int = 0) -> int:
    """Checkpoints that need room at the same time, at least the next one.

    One more than `checkpoint.keep_last`, where so many are made: an old one is deleted after a
    save, never before. Those of `kept_for_good` come on top, in time.

    Args:
        saved: complete ones of the run, which have their room already.
    """
    return max(1, min(config.checkpoint.keep_last + 1, saves(config)) - saved)


def kept_for_good(config: RunConfig) -> int:
    """Checkpoints that `checkpoint.keep_every_steps` has kept by the end of a run, at most."""
    every = config.checkpoint.keep_every_steps
    return config.total_steps // every if every else 0


def describe_kept(config: RunConfig, one: int) -> str:
    """Return what `kept_for_good` adds to a line on checkpoints of `one` bytes each; or nothing."""
    if not (kept := kept_for_good(config)):
        return ""
    return (
        f"; checkpoint.keep_every_steps={config.checkpoint.keep_every_steps} keeps up to {kept:,} "
        f"for good, {kept * one / GIB:,.2f} GiB by the end"
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank's part of a run takes on its device, at the peak of a step or its start.

    Attributes:
        weights, gradients, optimizer: as DeepSpeed keeps them from step to step.
        activations: what the backward pass of a micro-batch keeps, with the loss's own chunk.
        buffers: gathered or cast weights, and the buckets that gradients are reduced in, as far as
            they stand beside the activations or exceed them after those are gone; or the weights
            that ZeRO-3 begins with.
        advice: which keys lower it.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    advice: str

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

    Tensors are counted, not what passes lay beside them for a moment: to within `MEMORY_ACCURACY`
    for models like those of `tests/distributed/test_memory.py`; a small one on a CPU, with rows of
    32,768 tokens, took twice as much. Recurrences count as torch computes them; a GPU's kernels
    keep less. Multi-token attention counts a document a row; documents of a few tokens each, of
    which every one has c_q - 1 rows more, take up to three times as much. On a CPU only memory that
    is written to counts; a GPU's buckets are reserved whole.
    """
    train = config.train
    stage, bf16 = train.zero_stage, train.precision == "bf16"
    rows = train.micro_batch_size * world_size / train.sequence_parallel
    held = train.global_batch_size > rows  # gradients of earlier passes
    compute = 2.0 if bf16 else 4.0
    whole = 1 / world_size
    if stage == 0:
        weights, gradients, optimizer = 4.0, 4.0, 8.0
        beside = compute * parameters if bf16 else 0.0  # autocast's copies of the weights
    else:
        weights = compute * (whole if stage == 3 else 1)
        gradients, optimizer = 4.0 * (whole if stage >= 2 else 1), 12.0 * whole
        beside = compute * min(parameters, _LIVE_PARAMETERS) if stage == 3 else 0.0
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
    activations = _activations(config, on_gpu) + _loss_memory(config, vocab_size, on_gpu)
    activations += _document_masks(config, vocab_size, on_gpu)
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


def _activations(config: RunConfig, on_gpu: bool) -> float:
    """Bytes that the backward pass finds kept by the layers, for one micro-batch.

    The architecture counts the tensors of [B, T, C] and the maps of [B, T, T] of a layer.
    """
    train, architecture = config.train, config.architecture
    model = config.as_trained(config.model)
    bf16 = train.precision == "bf16"
    compute = 2.0 if bf16 else 4.0
    # Under autocast (stage 0) the residual stream and the norms stay fp32.
    autocast = bf16 and train.zero_stage == 0
    size = 2.13 if autocast else compute
    tokens = _tokens(config)
    wide = architecture.saved_in_fp32(model)
    tensors = size * (architecture.saved_tensors(model) - wide) + 4 * wide
    layer = tokens * model.hidden_size * tensors
    # Where ranks share sequences, those of a part of the heads.
    length = config.data.context_length
    maps = tokens * length * architecture.saved_maps(model, length, on_gpu, train.precision)
    layer += (4 + compute) * maps
    if train.activation_checkpointing:  # what each layer reads, and one layer's
        stream = 4.0 if autocast or architecture.stream_in_fp32(model) else compute
        return layer + stream * tokens * model.hidden_size * model.num_hidden_layers
    return layer * model.num_hidden_layers


def _document_masks(config: RunConfig, vocab_size: int, on_gpu: bool) -> float:
    """Bytes of the masks that keep documents apart: the model's, of bytes, and those of its layers.

    Each rank has all of them, however many share the sequences.
    """
    from cat_lm.training.engine import trained_config

    train, pairs = config.train, config.train.micro_batch_size * config.data.context_length**2
    if not config.data.mask_documents:
        return 0.0
    model = trained_config(config, vocab_size)
    kept = config.architecture.saved_masks(model, on_gpu, train.precision)
    layers = 1 if train.activation_checkpointing else config.model.num_hidden_layers
    width = 2 if train.precision == "bf16" else 4
    return pairs * (kept > 0) + width * pairs * layers * kept


def _tokens(config: RunConfig) -> int:
    """Count the tokens of a micro-batch that a rank computes."""
    tokens = config.train.micro_batch_size * config.data.context_length
    return tokens // config.train.sequence_parallel


def _loss_memory(config: RunConfig, vocab_size: int, on_gpu: bool) -> float:
    """Bytes of `linear_cross_entropy`: a chunk of logits (on a CPU in fp32, with their
    exponentials) and the gradients that it computes on the way, of the head in fp32 and of its
    input."""
    width = config.model.hidden_size
    compute = 2 if config.train.precision == "bf16" else 4
    tokens = _tokens(config)
    if on_gpu:
        length, stride = kernel_chunk(tokens, vocab_size, compute)
        chunk = compute * min(length, tokens) * stride
    else:
        chunk = 8 * min(CHUNK_ELEMENTS, tokens * vocab_size)
    return chunk + 4 * vocab_size * width + compute * tokens * width


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
