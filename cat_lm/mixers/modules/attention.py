"""Softmax attention over [B, T, H, D], plain and over convolved streams, and rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import State
from cat_lm.mixers.modules.projections import ConvolvedProjections
from cat_lm.ops.convolution.maps import sum_over_maps
from cat_lm.ops.runtime.documents import document_runs

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import attention, cat


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    *,
    document_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    state: State | None = None,
) -> Tensor:
    """Compute causal attention, [B, T, H, D], after the keys and values that `state` holds.

    Where every key is padding a query reads itself.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    real = padding_mask
    if state is not None:
        k, v, real = with_past(k, v, real, state)
    time, past = q.shape[2], k.shape[2] - q.shape[2]
    mask = None
    if real is not None or document_ids is not None or (past and time > 1):
        mask = torch.ones(time, past + time, dtype=torch.bool, device=q.device).tril(past)[None]
        if document_ids is not None:
            runs = document_runs(document_ids)
            mask = mask & (runs[:, :, None] == runs[:, None])
        if real is not None:
            itself = torch.eye(time, past + time, dtype=torch.bool, device=q.device).roll(past, 1)
            mask = (mask & real[:, None]) | itself
        mask = mask[:, None]
    causal = mask is None and not past  # a single query after others reads all of them
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
    return y.transpose(1, 2)


def with_past(
    k: Tensor, v: Tensor, real: Tensor | None, state: State
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Join the keys and values [B, H, S, D] with those before, and say which are no padding."""
    past = state["k"].shape[2] if "k" in state else 0
    if real is not None or "real" in state:
        new = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        before = state.get("real", new.new_ones(k.shape[0], past))
        real = state["real"] = torch.cat([before, new if real is None else real], dim=1)
    if past:
        k, v = (torch.cat([state[name], x], dim=2) for name, x in (("k", k), ("v", v)))
    state["k"], state["v"] = k.detach(), v.detach()
    return k, v, real


def rotate(x: Tensor, base: float = 10_000.0, positions: Tensor | None = None) -> Tensor:
    """Turn all channels of x [B, T, H, D] by their positions, halves together.

    Args:
        positions: [B, T]; none: 0, 1, 2, …
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    angles = positions[..., None] * frequencies
    cos, sin = angles.cos()[..., None, :].to(x.dtype), angles.sin()[..., None, :].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotated(
    q: Tensor, k: Tensor, padding_mask: Tensor | None, state: State | None
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the number of real tokens before them.

    Documents need no positions of their own: only distances count.
    """
    positions = None
    if padding_mask is not None or state is not None:
        real = q.new_ones(q.shape[:2], dtype=torch.long)
        counted = (real if padding_mask is None else padding_mask.long()).cumsum(dim=1)
        if state is not None:
            counted = counted + state.get("seen", torch.zeros_like(counted[:, :1]))
            state["seen"] = counted[:, -1:]
        positions = counted - 1
    return rotate(q, positions=positions), rotate(k, positions=positions)


class SoftmaxAttention(nn.Module):
    """One attention layer."""

    def __init__(self, options: attention.Options, setting: Setting) -> None:
        super().__init__()
        self.options = options
        self.projection = nn.Linear(setting.d_model, 3 * setting.d_model, bias=options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, self.options.heads, -1)).unbind(dim=2)
        if self.options.position == "rope":
            q, k = rotated(q, k, padding_mask, state)
        dropout = self.options.dropout if self.training else 0.0
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        return self.out_proj(softmax_attention(q, k, v, dropout, **how).flatten(2))


class ConvolutionAugmentedAttention(nn.Module):
    """One CAT layer."""

    def __init__(self, options: cat.Options, setting: Setting) -> None:
        super().__init__()
        self.mixes_maps = options.mixes_maps
        self.streams = ConvolvedProjections(setting.d_model, options, options.bias, self.mixes_maps)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)
        self.dropout, self.rotary = options.dropout, options.position == "rope"

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        q, k, v = self.streams(x, **how)
        if self.rotary:
            q, k = rotated(q, k, padding_mask, state)
        if self.mixes_maps:
            v = self.streams.mixed(v, **how)
        y = softmax_attention(q, k, v, self.dropout if self.training else 0.0, **how)
        if self.mixes_maps:
            y = sum_over_maps(y)
        return self.out_proj(y.flatten(2))
