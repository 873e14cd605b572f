"""What a forward pass takes, and what is free, so that it can be asked before the pass is made.

On a CPU, Linux ends a process that takes too much without a word, so that waiting for an error is
not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.host import available_memory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GIB = 2**30  # bytes
LOGIT_ELEMENTS = 2**23  # fp32 logits alive at once: 32 MiB, which fits a CPU's caches best


def forward_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """An estimate, rather low than high, of what a forward pass takes beside the weights.

    Per token: the residual stream and its norms, a layer's queries, keys and values as projected,
    convolved and rotated, its attention output, and its MLP before and after the activation. The
    eager attention, unlike the others, also holds its maps.
    """
    config = model.config
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    bytes_per = model.dtype.itemsize
    widths = 8 * width + 2 * inner
    if getattr(config, "mixes_maps", False):
        # The values that every head mixes for every other one, and what comes of them.
        widths += 2 * config.num_attention_heads * width
    total = rows * length * widths * bytes_per
    if config._attn_implementation == "eager":
        total += rows * config.num_attention_heads * length**2 * (bytes_per + 4)
    return total + 3 * 4 * LOGIT_ELEMENTS


def generation_bytes(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> int:
    """An estimate, as `forward_bytes`, of what the prompt's pass and the cache take."""
    config = model.config
    heads = config.num_attention_heads
    width = config.hidden_size // heads * (getattr(config, "num_key_value_heads", None) or heads)
    cached = 2 * config.num_hidden_layers * width * model.dtype.itemsize
    return forward_bytes(model, 1, prompt_tokens) + cached * (prompt_tokens + new_tokens)


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
