"""Rotary positions: transformers' own, with frequencies that keep their precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cat_lm.model.rope_scaling import rotary_magnitude

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class ExactRotaryMixin:
    """Keeps the frequencies of a rotary embedding of transformers in fp32.

    `model.to(torch.bfloat16)`, which training engines call, would round them too, and the angle at
    position 2,000 would be off by radians. `from_pretrained` keeps these buffers in fp32.

    With `temperature_scope: rotary`, cosines and sines carry the attention temperature.
    """

    def __init__(self, config: AttentionSettings):
        super().__init__(config)
        if config.rope_parameters.get("factor", 1) == 1 and self.rope_type != "default":
            # YaRN's mixture of a frequency with itself is off by a rounding error.
            self.rope_type = "default"
            inverse_frequencies, _ = self.compute_default_rope_parameters(config)
            self.inv_freq.copy_(inverse_frequencies)
            self.original_inv_freq.copy_(inverse_frequencies)
        self.attention_scaling *= rotary_magnitude(config)

    def _apply(self, fn, recurse=True) -> nn.Module:
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved.dtype != buffer.dtype and buffer.dtype == torch.float32:
                self._buffers[name] = buffer.to(moved.device)
        return self


class CatRotaryEmbedding(ExactRotaryMixin, GPTNeoXRotaryEmbedding):
    """GPT-NeoX's rotary embedding."""


class CatLlamaRotaryEmbedding(ExactRotaryMixin, LlamaRotaryEmbedding):
    """Llama's rotary embedding."""
