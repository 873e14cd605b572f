"""Attention of encoders: decayed logits, smoothed or filtered values, biases, rotations, chunks.

Decay and box are the language models' own (those of
`cat_lm.model.attention.modules.las`); where queries read both sides, the decay has no factors, and
logits are computed for some queries at a time. Padding stands at the end of rows: a causal model
never meets it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cat_lm.mixers import Setting
from cat_lm.mixers.parts.attention import rotary_angles
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.attention.modules.las import DecayScores, SmoothedValues
from cat_lm.model.attention.modules.scores import (
    ScoreModule,
    attend_by_rows,
    scale_queries_and_keys,
)
from cat_lm.model.context import Context
from cat_lm.ops import head_conv
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.api import centred_conv
from eval.long_range.options import Options


class AlibiScores(ScoreModule):
    """l − m_h |i − j| with m_h = 2^{−8 (h + 1) / H} (Press et al., 2022); later keys of a causal
    model are masked.

    Args:
        heads: H.
        scale: of the bias: 1, or 1/√D as the LaS paper's equation 2 has it.
    """

    def __init__(self, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale

    def separates(self, queries: int, dtype: torch.dtype, implementation: str) -> bool:
        return False

    def score(
        self, logits: Tensor, query_position: Tensor, key_position: Tensor, head: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        slopes = 2 ** (-8 * (head + 1).to(dtype) / self.heads)
        return logits - self.scale * slopes * (query_position - key_position).abs()


class LearnedFilter(nn.Module):
    """CAT's filter of values, one of W taps for each head, over the past or over both sides."""

    def __init__(self, heads: int, width: int, start: str, is_centred: bool) -> None:
        super().__init__()
        self.is_centred = is_centred
        if start == "box":
            taps = torch.full((heads, width), 1 / width)
        else:
            taps = kinds.HEAD.identity(heads, 1, width)
            taps = taps.roll(width // 2, dims=1) if is_centred else taps
        self.taps = nn.Parameter(taps)

    def forward(self, value: Tensor, padding_mask: Tensor | None) -> Tensor:
        if padding_mask is not None:
            value = value.masked_fill(~padding_mask[:, :, None, None], 0.0)
        return (centred_conv if self.is_centred else head_conv)(value, self.taps)


class Attention(nn.Module):
    """One layer, [B, T, C] to [B, T, C]."""

    def __init__(self, options: Options, setting: Setting, is_causal: bool) -> None:
        super().__init__()
        width, self.heads = setting.d_model, options.heads
        self.options, self.is_causal = options, is_causal
        self.projection = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.scores = self._scores(width // self.heads)
        place = options.place
        is_centred = place == "centred" or (place == "auto" and not is_causal)
        self.values: nn.Module | None = None
        if options.values == "learned":
            self.values = LearnedFilter(self.heads, options.width, options.start, is_centred)
        elif options.values == "box":
            self.values = SmoothedValues(options.width, None, is_centred)

    def _scores(self, head_width: int) -> ScoreModule | None:
        position, decay = self.options.position, self.options.decay
        if position.startswith("alibi"):
            scale = 1 / math.sqrt(head_width) if position == "alibi-scaled" else 1.0
            return AlibiScores(self.heads, scale)
        if decay != "none":
            bound = self.options.bound
            return DecayScores(self.heads, decay, bound, is_two_sided=not self.is_causal)
        return None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]; it reads the context's padding."""
        rows, time, padding_mask = *x.shape[:2], context.padding
        size = min(self.options.chunk or time, time)
        if size < time:
            x, padding_mask = _in_chunks(x, padding_mask, size)
        y = self._mix(x, padding_mask)
        return y.reshape(rows, -1, y.shape[-1])[:, :time] if size < time else y

    def _mix(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Attend in whole rows; causal queries never meet the padding after them."""
        q, k, v = self.projection(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        if self.options.position == "rope":
            cos, sin = rotary_angles(torch.arange(q.shape[1], device=q.device)[None], q)
            q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        if isinstance(self.values, LearnedFilter):
            v = self.values(v, padding)
        elif self.values is not None:
            v = self.values(v, Context(padding=padding))
        mask = None if self.is_causal else self._visible(x, padding)
        y = self._attend(*(stream.transpose(1, 2) for stream in (q, k, v)), mask)
        return self.out_proj(y.flatten(2))

    def _visible(self, x: Tensor, real: Tensor | None) -> Tensor | None:
        """Return what keys a row's queries read, [B or 1, 1, T, T] without memory of its own."""
        if real is None and self.scores is None:
            return None
        time = x.shape[1]
        if real is None:
            real = torch.ones(1, time, dtype=torch.bool, device=x.device)
        # A chunk of padding alone reads itself: what it gives is read by nobody.
        real = real | ~real.any(dim=1, keepdim=True)
        return real[:, None, None].expand(len(real), 1, time, time)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, H, D] of streams [B, H, T, D]."""
        time, scaling = q.shape[2], q.shape[3] ** -0.5
        if self.scores is not None:
            where = torch.arange(time, device=q.device)[None]
            if not self.scores.separates(time, q.dtype, "sdpa"):
                how = {"positions": where, "key_positions": where, "scaling": scaling}
                return attend_by_rows(self.scores, q, k, v, AttentionCall(mask=mask, **how))
            q, k = scale_queries_and_keys(self.scores, q, k, where, where)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.is_causal, scale=scaling
        )
        return y.transpose(1, 2)


def _in_chunks(x: Tensor, padding_mask: Tensor | None, size: int) -> tuple[Tensor, Tensor | None]:
    """Cut rows [B, T, C] into [B n, size, C], the last chunk filled up, and their mask likewise."""
    missing = -x.shape[1] % size
    if missing and padding_mask is None:
        padding_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    x = F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, size)).flatten(0, 1)
    if padding_mask is not None:
        padding_mask = F.pad(padding_mask, (0, missing)).unflatten(1, (-1, size)).flatten(0, 1)
    return x, padding_mask
