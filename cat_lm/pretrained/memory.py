"""Estimate what a forward pass takes and what is free, to be asked before the pass is made.

On a CPU, Linux ends a process that takes too much without a word, so that waiting for an error is
not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.core.host import available_memory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOGIT_ELEMENTS = 2**23  # fp32 logits in memory at once: 32 MiB, which fit into a CPU's caches


def forward_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """Estimate, rather low than high, what a forward pass takes beside the weights, in bytes.

    The eager attention, unlike the others, also holds its maps.
    """
    config, bytes_per = model.config, model.dtype.itemsize
    total = rows * length * _channels(model) * bytes_per
    if config._attn_implementation == "eager":
        total += rows * getattr(config, "num_attention_heads", 0) * length**2 * (bytes_per + 4)
    return total + 3 * 4 * LOGIT_ELEMENTS


def generation_bytes(model: PreTrainedModel, rows: int, prompt_tokens: int, new_tokens: int) -> int:
    """Estimate, as `forward_bytes`, what the prompt's pass and the decoding state take."""
    from cat_lm import architectures
    from cat_lm.counts import meta_model, state_bytes

    config, length, state = model.config, prompt_tokens + new_tokens, 0.0
    if architectures.find(config) is not None:
        state = state_bytes(meta_model(config), length, model.dtype)
    elif heads := getattr(config, "num_attention_heads", 0):
        # Keys and values of a model that no family knows.
        width = config.hidden_size * (getattr(config, "num_key_value_heads", None) or heads) / heads
        state = 2 * config.num_hidden_layers * width * model.dtype.itemsize * length
    return forward_bytes(model, rows, prompt_tokens) + round(rows * state)


def _channels(model: PreTrainedModel) -> int:
    """Return the numbers of a token in a layer that a forward pass holds at once.

    The residual stream and its norm, and three times what the widest product reads and makes; with
    it values mixed for every head, and queries and keys of further ranks.
    """
    from torch import nn

    config, head = model.config, model.get_output_embeddings()
    width = config.hidden_size
    products = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    widest = max((m.in_features + m.out_features for m in products), default=8 * width)
    mixed = 2 * config.num_attention_heads if getattr(config, "mixes_maps", False) else 0
    mixed += 4 * (getattr(config, "conv_rank", 1) - 1)
    return (2 + mixed) * width + 3 * widest


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be taken on the device; None where that is not known."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    return available_memory() if device.type == "cpu" else None
