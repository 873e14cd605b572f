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

from cat_lm.ops.landmark.attend import for_heads, local_keys
from cat_lm.ops.landmark.layout import BlockLayout, take_slots
from cat_lm.ops.landmark.select import candidates_of, landmark_scores
from cat_lm.ops.runtime.precision import at_least_fp32, without_autocast

# Up to this number of blocks in a row with documents, a matrix product sums faster than copies by
# block. Its cost grows with the square of the row's length.
FEW_BLOCKS = 64
# The least divisor; smaller sums of weights count as zero.
_TINY = 1e-20


def guided_loss(
    query: Tensor,
    key: Tensor,
    landmarks: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
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
    drawn = torch.randperm(query.shape[2], device=query.device)[:rows]
    own, query = layout.of_queries(drawn), take_slots(query, drawn[None])
    mass = block_mass(query, key, own, local, scaling)
    if isinstance(sharpness, Tensor):
        sharpness = sharpness[:, None, None]
    scores = landmark_scores(query, landmarks) * (sharpness * scaling)
    return divergence(scores, mass, candidates_of(own, local))


@torch.no_grad()
def block_mass(
    query: Tensor, key: Tensor, layout: BlockLayout, local: int, scaling: float
) -> Tensor:
    """M_j of candidate blocks, 0 of others: query [B, H, R, D], key [B, H or fewer, T, D].

    Args:
        layout: the layout of these queries, whose keys are those of `tokens`.

    Returns:
        [B, H, R, n].
    """
    time = key.shape[2]
    logits = (query * scaling).to(key.dtype) @ for_heads(key, query.shape[1]).mT
    logits = logits.masked_fill_(~local_keys(layout, time, time), -torch.inf)
    weights = logits.softmax(dim=-1, dtype=at_least_fp32(logits))
    return _sums_by_block(weights, layout) * candidates_of(layout, local)


def _sums_by_block(weights: Tensor, layout: BlockLayout) -> Tensor:
    """Sum weights [B, H, R, T] of tokens by their blocks, [B, H, R, n].

    What stands for a block that a row has not is any.
    """
    time, count = weights.shape[3], layout.numbers.shape[1]
    if layout.documents is None or count > FEW_BLOCKS:
        return layout.blocks_of(weights.mT).sum(dim=3).mT
    blocks = torch.arange(count, device=weights.device)
    # A product with this matrix of zeros and ones sums over the keys of each block.
    is_of = layout.key_blocks(time)[:, :, None] == blocks
    with without_autocast(weights):
        sums = weights.flatten(1, 2) @ is_of.to(weights.dtype)
    return sums.unflatten(1, weights.shape[1:3])


def divergence(scores: Tensor, mass: Tensor, candidates: Tensor) -> Tensor:
    """Return the scalar loss of scores [B, H, R, n] against the blocks' attention mass."""
    weight = mass.sum(dim=-1)
    target = mass / weight.clamp(min=_TINY)[..., None]
    # A large number and not infinity, which would make gradients of rows without candidates NaN.
    predicted = scores.masked_fill(~candidates, -1e30).log_softmax(dim=-1)
    different = torch.xlogy(target, target) - target * predicted.masked_fill(~candidates, 0.0)
    total = weight.sum(dim=-1).clamp(min=_TINY)
    return ((weight * different.sum(dim=-1)).sum(dim=-1) / total).mean()


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
