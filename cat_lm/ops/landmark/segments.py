"""Attention to chosen and local blocks, each by itself, and their sum: by a Triton kernel.

What a query sees is cut into segments: M = m + local runs of at most b keys, the first `length` of
a block's. A tile of queries meets a segment's block of keys in one product, and what a query gets
of each, o_s with the logarithm of its weight l_s, waits in a place of its own:

    y = sum_s w_s o_s,     w = softmax(l),

or softmax of the blocks' own logits for those that are weighed as wholes. Backward, with δ_s the
part of w_s dy·y that is the segment's, p the softmax within it and dl_s = w_s (dy·o_s − dy·y):

    dv = w p dy,     d(q·k) = p (w dy·v − δ),     δ = w dy·o − dl,

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
    """Say why the kernel cannot serve; None where it can."""
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
    block_logits: Tensor | None,
) -> Tensor:
    """Attend as `attend_gathered`, where `why_not` says nothing."""
    from cat_lm.ops.landmark import segments_triton as kernels

    firsts, lengths = segments_of(selected, layout, local)
    tile = kernels.options(layout.block, query.shape[3], query.dtype, False)["TILE"]
    tiles = tile_segments(firsts, lengths, key.shape[2], tile)
    if block_logits is not None:
        block_logits = block_logits.float().masked_fill(
            (selected < 0).repeat_interleave(query.shape[1] // selected.shape[1], dim=1), -torch.inf
        )
    return _Attention.apply(query, key, value, block_logits, tiles, layout.block, scaling)


class _Attention(torch.autograd.Function):
    """Attention by segments; gradients of queries, keys, values and blocks' logits."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_logits: Tensor | None,
        tiles: Tiles,
        block: int,
        scaling: float,
    ) -> Tensor:
        from cat_lm.ops.landmark import segments_triton as kernels

        parts, logs = kernels.forward(query, key, value, tiles, block, scaling)
        chosen = 0 if block_logits is None else block_logits.shape[3]
        logits = logs if not chosen else torch.cat([block_logits, logs[..., chosen:]], dim=3)
        weights = logits.softmax(dim=3)
        output = (weights.to(parts.dtype)[..., None, :] @ parts).squeeze(3)
        # Of what is one softmax, the output says enough of the parts.
        ctx.save_for_backward(query, key, value, weights, logs, parts if chosen else output)
        ctx.tiles, ctx.block, ctx.scaling, ctx.chosen = tiles, block, scaling, chosen
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from cat_lm.ops.landmark import segments_triton as kernels

        refuse_second_derivative("landmark attention by its Triton kernel")
        query, key, value, weights, logs, kept = ctx.saved_tensors
        exact, of_logits = gradient.float(), None
        if ctx.chosen:
            dots = (exact[..., None, :] @ kept.float().mT).squeeze(3)
            whole = (weights * dots).sum(dim=3, keepdim=True)
            deltas = weights * whole
            far = weights[..., : ctx.chosen]
            deltas[..., : ctx.chosen] = far * dots[..., : ctx.chosen]
            of_logits = far * (dots[..., : ctx.chosen] - whole)
        else:
            deltas = weights * (exact * kept.float()).sum(dim=3, keepdim=True)
        found = kernels.backward(
            gradient, query, key, value, weights, logs, deltas, ctx.tiles, ctx.block, ctx.scaling
        )
        return *found, of_logits, None, None, None
