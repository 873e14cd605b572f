"""What a forward pass takes, and what is free, so that it can be asked before the pass is made.

On a CPU, Linux ends a process that takes too much without a word, so that waiting for an error is
not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm import architectures
from cat_lm.architectures.base import key_value_bytes, layer_channels
from cat_lm.core.host import available_memory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOGIT_ELEMENTS = 2**23  # fp32 logits alive at once: 32 MiB, which fits a CPU's caches best


def forward_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """An estimate, rather low than high, of what a forward pass takes beside the weights.

    The eager attention, unlike the others, also holds its maps.
    """
    config, architecture = model.config, architectures.find(model.config)
    bytes_per = model.dtype.itemsize
    if architecture is None:
        channels = layer_channels(config)
    else:
        channels = architecture.forward_channels(architecture.section(config))
    total = rows * length * channels * bytes_per
    if config._attn_implementation == "eager":
        total += rows * getattr(config, "num_attention_heads", 0) * length**2 * (bytes_per + 4)
    return total + 3 * 4 * LOGIT_ELEMENTS


def generation_bytes(model: PreTrainedModel, rows: int, prompt_tokens: int, new_tokens: int) -> int:
    """An estimate, as `forward_bytes`, of what the prompt's pass and the decoding state take."""
    config, architecture = model.config, architectures.find(model.config)
    length, itemsize = prompt_tokens + new_tokens, model.dtype.itemsize
    if architecture is None:
        state = key_value_bytes(config, length, itemsize)
    else:
        state = architecture.state_bytes(architecture.section(config), length, itemsize)
    return forward_bytes(model, rows, prompt_tokens) + rows * state


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on the device, in bytes; None where that is not known."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    if device.type != "cpu":
        return None
    return available_memory()
