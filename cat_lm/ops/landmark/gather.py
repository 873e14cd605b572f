"""Attention of a few queries to chosen blocks, whose keys and values are copied together.

It reads the local keys and those of chosen blocks, and no others: for decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.landmark.layout import BlockLayout, take_slots
from cat_lm.ops.landmark.reference import precise


def attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
) -> Tensor:
    """Attend as `attend_by_masks`.

    Args:
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        selected: [B, G, T, m], G the heads of keys or 1.

    Returns:
        [B, H, T, D].
    """
    batch, heads, time, width = query.shape
    shared = key.shape[1]
    # Queries of the heads that read the same keys side by side: [B, G, T, H / G, D].
    query = query.unflatten(1, (shared, -1)).transpose(2, 3)
    near, sees_near = _local_slots(layout, local)
    far, sees_far = _slots_of(selected, layout)
    near_keys, near_values = take_slots(key, near), take_slots(value, near)
    far_keys, far_values = _take_own(key, far), _take_own(value, far)
    near_logits = (query @ near_keys.mT * scaling).masked_fill(~sees_near, -torch.inf)
    far_logits = (query @ far_keys.mT * scaling).masked_fill(~sees_far, -torch.inf)
    logits = torch.cat([near_logits, far_logits], dim=-1)
    weights = logits.softmax(dim=-1, dtype=precise(logits))
    of_near, of_far = weights.to(value.dtype).split([near.shape[2], far.shape[3]], dim=-1)
    output = of_near @ near_values + of_far @ far_values
    return output.transpose(2, 3).reshape(batch, heads, time, width)


def _local_slots(layout: BlockLayout, local: int) -> tuple[Tensor, Tensor]:
    """The slots of the local keys [1, T, local b], newest first, and whether they are seen."""
    back = torch.arange(local * layout.block, device=layout.slots.device)
    positions = layout.positions[:, :, None]
    own = positions.div(layout.block, rounding_mode="floor")
    oldest = ((own - local + 1) * layout.block).clamp(min=0)
    sees = (positions - back >= oldest) | (back == 0)  # padding sees itself
    slots = (layout.slots[:, None] - back).clamp(min=0)[None]
    return slots, sees[:, None, :, None]


def _slots_of(selected: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """The slots of chosen blocks [B, G, T, m b], and which there are [B, G, T, 1, m b]."""
    starts = layout.starts[:, None, None].expand(*selected.shape[:3], -1)
    first = starts.gather(3, selected.clamp(min=0).long())
    slots = first[..., None] + torch.arange(layout.block, device=first.device)
    is_there = (selected >= 0)[..., None].expand_as(slots)
    slots = torch.where(is_there, slots, 0)
    return slots.flatten(3), is_there.flatten(3)[:, :, :, None]


def _take_own(x: Tensor, slots: Tensor) -> Tensor:
    """Take rows of x [B, H, S, D] at each head's slots [B, H or 1, T, L]: [B, H, T, L, D]."""
    batch, heads = x.shape[:2]
    rows = torch.arange(batch, device=x.device)[:, None, None, None]
    return x[rows, torch.arange(heads, device=x.device)[:, None, None], slots]
