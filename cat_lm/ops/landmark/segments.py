"""Attention to chosen and local blocks, each by itself, and their sum: by a Triton kernel.

What a query sees is cut into segments: M = m + local runs of at most b keys, the first `length` of
a block's. A tile of queries meets a segment's block of keys in one product, and what a query gets
of each, o_s with the logarithm of its weight l_s, waits in a place of its own:

    y = sum_s w_s o_s,     w = softmax(l),

Backward, with δ_s = w_s dy·y and p the softmax within a segment:

    dv = w p dy,     d(q·k) = p (w dy·v − δ),

a block's keys by one program, in the order of the tiles: no atomics, the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.segment_tiles import Tiles, segments_of, sides, tile_segments
from cat_lm.ops.runtime.operators import refuse_second_derivative
from cat_lm.ops.runtime.triton_launch import INSTALLED, INTERPRETED

# Keys of a block times channels of a head, both as powers of 2, that fit into shared memory.
MOST = {torch.float32: 64 * 64, torch.bfloat16: 128 * 128, torch.float16: 128 * 128}


def why_not(device: torch.device, dtype: torch.dtype, block: int, width: int) -> str | None:
    """Return why the kernel cannot serve; None where it can."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return f"it computes cuda tensors, not {device.type} tensors"
    if dtype not in MOST:
        return f"it has no {str(dtype).removeprefix('torch.')}"
    held = sides(block)[0] * sides(width)[0]
    if held <= MOST[dtype]:
        return None
    return (
        f"block={block} by heads of {width} channels are {held} numbers of its {MOST[dtype]} in "
        f"{str(dtype).removeprefix('torch.')}"
    )


@torch.compiler.disable
def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
) -> Tensor:
    """Attend as `attend_gathered`, where `why_not` says nothing."""
    from cat_lm.ops.landmark import segments_triton as kernels

    firsts, lengths = segments_of(selected, layout, local)
    tile = kernels.options(layout.block, query.shape[3], query.dtype, False)["TILE"]
    tiles = tile_segments(firsts, lengths, key.shape[2], tile)
    return _Attention.apply(query, key, value, tiles, layout.block, scaling)


class _Attention(torch.autograd.Function):
    """Attention by segments; gradients of queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Tiles,
        block: int,
        scaling: float,
    ) -> Tensor:
        from cat_lm.ops.landmark import segments_triton as kernels

        parts, logs = kernels.forward(query, key, value, tiles, block, scaling)
        weights = logs.softmax(dim=3)
        output = (weights.to(parts.dtype)[..., None, :] @ parts).squeeze(3)
        ctx.save_for_backward(query, key, value, weights, logs, output, *vars(tiles).values())
        ctx.block, ctx.scaling = block, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from cat_lm.ops.landmark import segments_triton as kernels

        refuse_second_derivative("landmark attention by its Triton kernel")
        query, key, value, weights, logs, output, *tiles = ctx.saved_tensors
        deltas = weights * (gradient.float() * output.float()).sum(dim=3, keepdim=True)
        found = kernels.backward(
            gradient,
            query,
            key,
            value,
            weights,
            logs,
            deltas,
            Tiles(*tiles),
            ctx.block,
            ctx.scaling,
        )
        return *found, None, None, None
