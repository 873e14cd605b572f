"""Rotary positions: transformers' own, with frequencies that keep their precision."""

from __future__ import annotations

import torch
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding


class CatRotaryEmbedding(GPTNeoXRotaryEmbedding):
    """GPT-NeoX's rotary embedding whose frequencies stay in fp32.

    `model.to(torch.bfloat16)`, which training engines call, would round the frequencies too. The
    angle at position 2,000 would then be off by radians, and differ from that of the same weights
    loaded with `from_pretrained`, which keeps these buffers in fp32.
    """

    def _apply(self, fn, recurse=True):
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved.dtype != buffer.dtype and buffer.dtype == torch.float32:
                self._buffers[name] = buffer.to(moved.device)
        return self
