"""What a forward pass takes, and what is free, so that it can be asked before the pass is made.

On a CPU, Linux ends a process that takes too much without a word, so that waiting for an error is
not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.core.host import available_memory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOGIT_ELEMENTS = 2**23  # fp32 logits alive at once: 32 MiB, which fits a CPU's caches best


def forward_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """An estimate, rather low than high, of what a forward pass takes beside the weights.

    The eager attention, unlike the others, also holds its maps.
    """
    config, bytes_per = model.config, model.dtype.itemsize
    total = rows * length * _channels(model) * bytes_per
    if config._attn_implementation == "eager":
        total += rows * getattr(config, "num_attention_heads", 0) * length**2 * (bytes_per + 4)
    return total + 3 * 4 * LOGIT_ELEMENTS


def generation_bytes(model: PreTrainedModel, rows: int, prompt_tokens: int, new_tokens: int) -> int:
    """An estimate, as `forward_bytes`, of what the prompt's pass and the decoding state take."""
    from cat_lm import architectures
    from cat_lm.counts import meta_model, state_bytes

    length = prompt_tokens + new_tokens
    if architectures.find(model.config) is None:
        state = _key_value_bytes(model, length)
    else:
        state = state_bytes(meta_model(model.config), length, model.dtype)
    return forward_bytes(model, rows, prompt_tokens) + round(rows * state)


def _key_value_bytes(model: PreTrainedModel, length: int) -> int:
    """Count keys and values of a model that no family knows, or nothing where it has no heads."""
    config = model.config
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    width *= getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * width * model.dtype.itemsize * length


def _channels(model: PreTrainedModel) -> int:
    """Count a token's numbers in a layer, as a forward pass holds them at once.

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
    """Memory that can still be taken on the device, in bytes; None where that is not known."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    if device.type != "cpu":
        return None
    return available_memory()
