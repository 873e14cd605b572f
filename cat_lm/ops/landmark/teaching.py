"""The guided loss: landmarks learn which blocks dense attention gives its weight to.

For query t and head h, with A the row of dense attention, M_j its sum over the keys of candidate
block j, w = sum_j M_j, π = M / w and p = softmax_j(exp(θ_h) q·K̄_j / (t sqrt(D))):

    sum_t w KL(π ‖ p) / sum_t w,

over some of the queries, and its mean over heads and rows. A gets no gradient; queries, keys,
filter and θ do. SeerAttention and DeepSeek's sparse attention teach other selectors so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.reference import for_heads, local_keys
from cat_lm.ops.landmark.select import candidates_of, landmark_scores

# Weights below it are none.
_TINY = 1e-20


def guided_loss(
    query: Tensor,
    key: Tensor,
    landmarks: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: Tensor | float,
    sharpness: Tensor | float,
    rows: int,
) -> Tensor:
    """Compute the loss of a layer on `rows` queries that are drawn anew, a number.

    Args:
        query: [B, H, T, D].
        key: [B, H or fewer, T, D].
        landmarks: [B, H or fewer, n, D].
        sharpness: exp(θ), [H] or one for all.
    """
    heads, time = query.shape[1], query.shape[2]
    drawn = torch.randperm(time, device=query.device)[:rows]
    own, query = layout.of_queries(drawn), query[:, :, drawn]
    candidates = candidates_of(own, local)
    with torch.no_grad():
        keys = for_heads(key, heads)
        logits = (query @ keys.mT).float() * scaling
        weights = logits.masked_fill(~local_keys(own, time, time), -torch.inf).softmax(dim=-1)
        index = layout.key_blocks(time)[:, None, None].expand_as(weights)
        count = landmarks.shape[2]
        mass = weights.new_zeros(*weights.shape[:3], count + 1).scatter_add(3, index, weights)
        mass = mass[..., :count] * candidates
        weight = mass.sum(dim=-1)
        target = mass / weight.clamp(min=_TINY)[..., None]
    if isinstance(sharpness, Tensor):
        sharpness = sharpness[:, None, None]
    scores = landmark_scores(query, landmarks) * (sharpness * scaling)
    # A large number and not infinity, which would make gradients of rows without candidates NaN.
    predicted = scores.masked_fill(~candidates, -1e30).log_softmax(dim=-1)
    divergence = torch.xlogy(target, target) - target * predicted.masked_fill(~candidates, 0.0)
    total = weight.sum(dim=-1).clamp(min=_TINY)
    return ((weight * divergence.sum(dim=-1)).sum(dim=-1) / total).mean()


def attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    scaling: float,
    dropout: float,
    is_plain: bool,
) -> Tensor:
    """Attend with [B, H, T, D] to all earlier keys of the document: [B, H, T, D].

    Args:
        is_plain: whether there are neither documents nor padding, so that no mask is needed.
    """
    heads, time = query.shape[1], query.shape[2]
    key, value = (for_heads(x, heads) for x in (key, value))
    mask = None if is_plain else local_keys(layout, time, time)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_plain, scale=scaling
    )
