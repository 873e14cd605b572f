"""Quantities derived from the configuration: parameters, FLOPs, memory, a device's peak.

The one definition of each; log, benchmarks and planning use these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cat_lm.config import RunConfig
from cat_lm.model import CatConfig
from cat_lm.model.convolution import identity_filters

if TYPE_CHECKING:
    from cat_lm.model import CatForCausalLM

# What a rank really takes was within this factor of the estimate wherever it was measured.
MEMORY_ACCURACY = 1.25

# Dense bf16 TFLOP/s of one device from the makers' data sheets, the most specific name first.
_PEAK_BF16_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def count_parameters(model: torch.nn.Module) -> int:
    """Each parameter once, whole even where ZeRO-3 has partitioned it."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def lookup_parameters(config: CatConfig) -> int:
    """Parameters of the input embedding where it multiplies nothing: untied from the head."""
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


def flops_per_token(config: CatConfig, parameters: int, context_length: int) -> float:
    """Floating-point operations of forward and backward per token.

    6 per parameter that multiplies once (all but the embedding that is only looked up and the
    filters), 12·L·T·C for the attention products over the full square (Chowdhery et al., 2022,
    appendix B), and 6·W per channel of each convolved stream, H times that where heads are mixed.
    Mixed attention maps multiply the values of all heads: the half of the attention products that
    belongs to the values counts H times.
    """
    layers, width, heads = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
    )
    values_read = heads if config.conv_type == "multihead" and config.conv_mixing == "maps" else 1
    attention = 6 * layers * context_length * width * (1 + values_read)
    convolution = filters = 0
    if config.conv_type != "none":
        convolved = layers * len(config.convolved_streams)
        heads_read = heads if config.conv_type == "multihead" else 1
        convolution = 6 * config.conv_window * heads_read * width * convolved
        filters = identity_filters(config).numel() * convolved
    matrices = parameters - lookup_parameters(config) - filters
    return 6 * matrices + attention + convolution


def peak_flops(config: RunConfig, device: torch.device) -> float | None:
    """Peak FLOP/s of one device: `train.peak_tflops`, else by its name in bf16, else unknown."""
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops * 1e12
    return device_peak_flops(device) if config.train.precision == "bf16" else None


def device_peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a GPU by its name; None for one that is not listed, and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in _PEAK_BF16_TFLOPS if part in name), None)


def meta_model(config: RunConfig, vocab_size: int) -> CatForCausalLM:
    """The configuration's model without its weights (on the meta device), in milliseconds.

    Args:
        vocab_size: the tokenizer's; `model.vocab_size` comes before it.

    Raises:
        UserError: the model cannot be built.
    """
    from cat_lm.training.engine import build_model

    # Building draws from the generator, which is the run's.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(config, vocab_size)


def checkpoint_bytes(parameters: int) -> int:
    """Bytes of a checkpoint: fp32 weights and AdamW's two moments, and the weights for export."""
    return (12 + 4) * parameters


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank's part of a run takes on its device, at the peak of a step.

    Attributes:
        weights, gradients, optimizer: as DeepSpeed keeps them from step to step.
        buffers: what it copies gradients and gathered weights into.
        activations: what the backward pass of a micro-batch keeps, and the loss's own.
        advice: which keys lower it.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    advice: str

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.buffers + self.activations

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "buffers", "activations")
        return ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in names)


def memory_per_rank(config: RunConfig, parameters: int, world_size: int, vocab_size: int) -> Memory:
    """What a rank needs, to within `MEMORY_ACCURACY`; precision must be decided.

    States as DeepSpeed keeps them; activations after Korthikanti et al., 2022 (34·B·T·C bytes a
    layer in 16 bits, without the attention matrix, which no fused attention stores).
    """
    stage, bf16 = config.train.zero_stage, config.train.precision == "bf16"
    if stage == 0:
        weights, gradients, optimizer = 4.0, 4.0, 8.0
    else:
        weights, gradients, optimizer = (2.0, 4.0, 12.0) if bf16 else (4.0, 4.0, 12.0)
        weights /= world_size if stage == 3 else 1
        gradients /= world_size if stage >= 2 else 1
        optimizer /= world_size
    model = config.model
    tokens = config.train.micro_batch_size * config.data.context_length
    layer = 34.0 * tokens * model.hidden_size * (1 if bf16 else 2)
    kept = layer * model.num_hidden_layers
    if config.train.activation_checkpointing:
        kept = layer + 2 * tokens * model.hidden_size * (1 if bf16 else 2) * model.num_hidden_layers
    return Memory(
        weights * parameters,
        gradients * parameters,
        optimizer * parameters,
        4.0 * vocab_size * model.hidden_size,
        kept,
        _memory_advice(config, world_size),
    )


def _memory_advice(config: RunConfig, world_size: int) -> str:
    train, ways = config.train, []
    if train.micro_batch_size > 1:
        ways.append(f"lower train.micro_batch_size={train.micro_batch_size}")
    if not train.activation_checkpointing:
        ways.append("set train.activation_checkpointing=true")
    if train.zero_stage < 3 and world_size > 1:
        ways.append(f"raise train.zero_stage={train.zero_stage}")
    ways.append("take a smaller model or a larger device")
    return ", or ".join(ways)
